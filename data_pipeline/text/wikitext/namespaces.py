"""Names that decide whether a wikilink is text: of file and category namespaces, languages, projects; and redirects.

Names are spelled as `normalised_namespace` returns them. English names work in every wiki, the others in one. Names
that begin titles in other wikis ("Imagine: John Lennon") are left out, since files are also recognised by their suffix.
"""

import re

_MARKS = re.compile("[\u200e\u200f\u202a-\u202e]")  # marks of text direction, which MediaWiki removes from titles


def normalised_namespace(name: str) -> str:
    """A namespace or an interwiki prefix in lower case, with single spaces and no marks of direction.

    "\u200eBild_Diskussion "  ->  "bild diskussion"
    """
    return _MARKS.sub("", name.replace("_", " ")).strip().lower()


def names(block: str) -> frozenset[str]:
    """The words of a text, with spaces for underscores."""
    return frozenset(word.replace("_", " ") for word in block.split())


FILE_NAMESPACES = names(
    """
    file image media
    archivo arquivo attēls bestand afbeelding berkas bild bildo billede bilde dosiero dosya datei datoteka delwedd
    ficheiro ficheru fichier fil fitxategi fitxer fișier fişier fájl gambar grafika hình imagem imagen imatge
    imaxe immagine irudi itcel kuva kép mynd obrázok pilt plik resim skrá slika soubor súbor talaksan tiedosto
    vaizdas íomhá faili fayl şəkil medija medeja medya médium média mídia lêer
    tập_tin phương_tiện
    αρχείο εικόνα
    файл изображение зображення выява картинка датотека слика сурет сүрөт медиа медија медия
    պատկեր ფაილი სურათი
    ملف صورة وسائط پرونده تصویر مدیا فائل وێنە קובץ תמונה מדיה
    चित्र चित्रम् मीडिया চিত্র ছবি મીડિયા ચિત્ર ਤਸਵੀਰ படிமம் దస్త్రం బొమ్మ ಚಿತ್ರ പ്രമാണം ചിത്രം ගොනුව ไฟล์ ภาพ ဖိုင်
    imej larawan litrato fasciculus wêne wobraz restr dataja failas eecama taswiira picha talet comhad faidhle coadan
    ìomhaigh immàgini imàgine immaggini sary
    сүрәт һүрәт ӳкерчĕк суьрат податотека эмблем нерм расм зураг ойса
    دوتنه انځور پەڕگە وېنە عکس فایل شکل ܠܦܦܐ ފައިލު ስዕል
    सञ्चिका संचिका फाइल किपा ਫ਼ਾਈਲ ଫାଇଲ சான்று ಫೈಲ್ ຮູບ ឯកសារ
    파일 그림 미디어 ファイル 画像 メディア 文件 檔案 档案 图像 圖像 媒体 媒體
    """
)

CATEGORY_NAMESPACES = names(
    """
    category
    catagóir catégorie categoria categoría categorie categuria catigurìa catigoría bólkur flokkur kategori kategoria
    kategorie kategorija kategoreja kategorio kategorija kategooria kategória kateqoriya kategorîya kategorya kaarangay
    kawanan luokka rummad toifa turkum thể_loại
    abdeeling categorîa catègorie categurìa catigoria catégourie ẹ̀ka flocc jamii kateggoría kategoriija kategorijo
    kategoriya kategoriye kategoriyê kategoriýa kategory kategoryja kategoryjo kategorėjė kategorëjô katiguriya katigori
    klad ñemohenda roinn-seòrsa ronney setensele sokajy sumut_atassuseq kaubanan toddubiya
    κατηγορία
    категори категориэ катагори гурӯҳ ангилал
    категория категорія катэгорыя категорија катеґорія санат төркем
    կատեգորիա კატეგორია
    وېشنيزه زمرو رج تۈر بؤلمه سانات ټولۍ ܣܕܪܐ ޤިސްމު መደብ
    ᏗᏓᏴᎳᏛᏍᏗ ໝວດ རིགས་ पुचः वर्गः শ্ৰেণী থাক ଶ୍ରେଣୀ
    تصنيف رده زمرہ پۆل קטגוריה קאטעגאריע
    श्रेणी वर्ग বিষয়শ্রেণী શ્રેણી ਸ਼੍ਰੇਣੀ பகுப்பு వర్గం ವರ್ಗ വർഗ്ഗം ප්‍රවර්ගය หมวดหมู่ ကဏ္ဍ ចំណាត់ថ្នាក់ក្រុម
    분류 カテゴリ カテゴリー 分类 分類
    """
)

# Codes of Wikipedias, closed ones included: [[de:Titel]] without a leading colon is a language link, not text.
LANGUAGES = names(
    """
    aa ab ace ady af ak als alt am ami an ang ann anp ar arc ary arz as ast atj av avk awa ay az azb ba ban bar bat-smg
    bbc bcl bdr be be-tarask be-x-old bew bg bh bi bjn blk bm bn bo bpy br bs btm bug bxr ca cbk-zam cdo ce ceb ch cho
    chr chy ckb co cr crh cs csb cu cv cy da dag de dga din diq dk dsb dtp dty dv dz ee el eml en eo es et eu ext fa fat
    ff fi fiu-vro fj fo fon fr frp frr fur fy ga gag gan gcr gd gl glk gn gom gor got gpe gsw gu guc gur guw gv ha hak
    haw he hi hif ho hr hsb ht hu hy hyw hz ia iba id ie ig igl ii ik ilo inh io is it iu ja jam jbo jp jv ka kaa kab
    kbd kbp kcg kg kge ki kj kk kl km kn knc ko koi kr krc ks ksh ku kus kv kw ky la lad lb lbe lez lfn lg li lij lld
    lmo ln lo lrc lt ltg lv lzh mad mai map-bms mdf mg mh mhr mi min minnan mk ml mn mni mnw mo mos mr mrj ms mt mus
    mwl my myv mzn na nah nan nap nb nds nds-nl ne new ng nia nl nn no nov nqo nr nrm nso nup nv ny oc olo om or os pa
    pag pam pap pcd pcm pdc pdt pfl pi pih pl pms pnb pnt ps pt pwn qu rm rmy rn ro roa-rup roa-tara rsk ru rue rup rw
    sa sah sat sc scn sco sd se sg sgs sh shi shn si simple sk skr sl sm smn sn so sq sr srn ss st stq su sv sw syl szl
    szy ta tay tcy tdd te tet tg th ti tig tk tl tly tn to tpi tr trv ts tt tum tw ty tyv udm ug uk ur uz ve vec vep vi
    vls vo vro wa war wo wuu xal xh xmf yi yo yue za zea zgh zh zh-cfr zh-classical zh-cn zh-min-nan zh-tw zh-yue zu
    """
)

# [[wikt:word]] reads as "word".
SISTER_PROJECTS = names(
    """
    w wikipedia-en wikt wiktionary s wikisource q wikiquote b wikibooks n wikinews v wikiversity voy wikivoyage c
    commons m meta species wikispecies d wikidata mw
    """
)

FILE_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".gif", ".svg", ".tif", ".tiff", ".webp", ".xcf", ".djvu", ".pdf", ".mid", ".stl"),
    *(".ogg", ".oga", ".ogv", ".opus", ".webm", ".wav", ".mp3", ".flac", ".mpg"),
)

# {{PAGENAME}} and similar words, which stand for the article's title: the English names, and those of some wikis.
PAGE_NAMES = names(
    """
    pagename fullpagename basepagename subpagename rootpagename articlepagename subjectpagename
    seitenname vollerseitenname nompage nombredepagina nombredepágina nomepagina paginanaam nomedapagina nomedapágina
    nazwastrony sidnamn sidenavn sivunimi имястраницы названиестраницы назва_сторінки 页面名 頁面名 ページ名 문서이름
    """
)

YEAR_NAMES = frozenset({"currentyear", "localyear"})


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
# A page that only has "#Word [[link]]" and categories isn't an article, whatever the word means.
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
