"""Whether a page's wikitext is a redirect, in any of MediaWiki's languages."""

import re

# MediaWiki's `redirect` magic words, without "#"; in any case. The English one works in every wiki.
_KEYWORDS = """
    redirect
    aanstuur adkas ail-cyfeirio ailgyfeirio alidirekto alidirektu alih ancaminar athsheoladh aýdaw aastiurey àtúndarí
    baw-ing beralîkirin birzuzendu deurverwiezing doorverwijzing elekeza fihodinana hetenayış hetenayene
    i̇stiqamətləndirmə i̇stiqamətləndir istiqamətləndirmə istiqamətləndir lencong ohjaus uudelleenohjaus oigendus
    omdiriger omdirigering ömleidung pāradresācija patrz przekieruj tam przekerůj peradresavimas nukreipimas
    preusmjeri preusmeri preusmeritev preusmerenje přesměruj presmeruj pusapuna redirecció redirección redireccion
    redirecionamento redirèccion redirectează redirecteaza redirection reindirizza ridrejto
    rimando rindirizza rinvia rinvio saadaq stir stivren ođđasitstivren suuna tilvísun umleitung weiterleitung
    wiederleiden yoʻnaltirish yo'naltirish yonaltirish yönlendirme yönlendi̇rme yönlendir yönlendi̇r yünältü átirányítás
    đổi đổi_hướng_đến đổi_hướng
    ανακατευθυνση ανακατεύθυνση
    айдау айдоо багыттама буссинаби виж види дӏасахьажорг дӏасахьажор дӏасахьажайар көжүрүлге көчүрүлге йүнәлтеү
    перанакіраванне перанакіраваньне перанакіраваць перенаправление перенапр перенаправлення пренасочване
    пренасочување пренасочи преусмери преусмјери прѣнаправлєниѥ прѣнаправлєниѩ равонакунӣ рахкурун рарвыст утаарыы
    æрвитын æрвыст ӕрвитын ӕрвыст юнәлтү чиглүүлэх
    վերահղում გადამისამართება გინოწურაფა
    הפניה ווייטערפירן
    تحويل تغییر_مسیر تغییرمسیر رجوع_مکرر رجوع_مكرر بور مخ_گرځونه چوريو ايداۋ ڕەوانەکردن ڕەوانەکردنەوە قايتا_نىشانلاش
    ܨܘܝܒܐ ܨܘܝܒ
    अनुप्रेषित पुनर्निर्देशन पुनर्निर्देशित पुनर्निदेशन पुनर्निर्देश विपुनर्निर्देशन
    পুনর্নির্দেশ পুননির্দেশ পুনৰ্নিৰ্দেশ ਰੀਡਿਰੈਕਟ ਰੀਡਾਇਰੈਕਟ ପୁନଃପ୍ରେରଣ ଲେଉଟାଣି வழிமாற்று దారిమార్పు
    ಪುನರ್ನಿರ್ದೇಶನ തിരിച്ചുവിടുക തിരിച്ചുവിടൽ തിരിച്ചുവിടല് യළියොමුව යළියොමුව
    เปลี่ยนทาง ប្តូរទីតាំងទៅ ប្ដូរទីតាំងទៅ ប្តូរទីតាំង ប្ដូរទីតាំង ប្ដូរចំណងជើង បញ្ជូនបន្ត
    넘겨주기 転送 リダイレクト 重定向 重新导向 重新導向 跳轉 跳转
"""

_LINK = r"\s*:?\s*\[\["
_KNOWN = re.compile(
    rf"\s*[#＃](?:{'|'.join(re.escape(word).replace('_', '[ _]') for word in _KEYWORDS.split())}){_LINK}", re.IGNORECASE
)
# A page with nothing but "#Word [[link]]" and categories is no article, whatever the word means.
_ALONE = re.compile(
    rf"\s*[#＃][^\s#*:;\[\]{{}}|]{{1,40}}{_LINK}[^\[\]\n]*\]\]\s*(?:(?:\[\[[^\[\]]*\]\]|\{{\{{[^{{}}]*\}}\}})\s*)*"
)


def is_redirect(wikitext: str) -> bool:
    """Whether a page redirects to another one.

    "#REDIRECT [[Ulm]]"  ->  True      "#weiterleitung: [[Ulm]]"  ->  True      "The #REDIRECT of a page"  ->  False
    """
    head = wikitext[:2000].lstrip()
    if not head.startswith(("#", "＃")):
        return False
    return bool(_KNOWN.match(head)) or (len(wikitext) <= 2000 and _ALONE.fullmatch(head) is not None)
