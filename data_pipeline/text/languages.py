"""Language codes: 184 languages have a code of two letters in ISO 639, and also one of three."""

import functools
import re

_CODE = re.compile(r"[A-Za-z]{2,3}(?![^-_])")
# ISO 639-1 and 639-3, as https://iso639-3.sil.org lists them; then the bibliographic codes of ISO 639-2
_THREE_LETTERS = """
aa:aar ab:abk ae:ave af:afr ak:aka am:amh an:arg ar:ara as:asm av:ava ay:aym az:aze ba:bak be:bel bg:bul bi:bis
bm:bam bn:ben bo:bod br:bre bs:bos ca:cat ce:che ch:cha co:cos cr:cre cs:ces cu:chu cv:chv cy:cym da:dan de:deu
dv:div dz:dzo ee:ewe el:ell en:eng eo:epo es:spa et:est eu:eus fa:fas ff:ful fi:fin fj:fij fo:fao fr:fra fy:fry
ga:gle gd:gla gl:glg gn:grn gu:guj gv:glv ha:hau he:heb hi:hin ho:hmo hr:hrv ht:hat hu:hun hy:hye hz:her ia:ina
id:ind ie:ile ig:ibo ii:iii ik:ipk io:ido is:isl it:ita iu:iku ja:jpn jv:jav ka:kat kg:kon ki:kik kj:kua kk:kaz
kl:kal km:khm kn:kan ko:kor kr:kau ks:kas ku:kur kv:kom kw:cor ky:kir la:lat lb:ltz lg:lug li:lim ln:lin lo:lao
lt:lit lu:lub lv:lav mg:mlg mh:mah mi:mri mk:mkd ml:mal mn:mon mr:mar ms:msa mt:mlt my:mya na:nau nb:nob nd:nde
ne:nep ng:ndo nl:nld nn:nno no:nor nr:nbl nv:nav ny:nya oc:oci oj:oji om:orm or:ori os:oss pa:pan pi:pli pl:pol
ps:pus pt:por qu:que rm:roh rn:run ro:ron ru:rus rw:kin sa:san sc:srd sd:snd se:sme sg:sag sh:hbs si:sin sk:slk
sl:slv sm:smo sn:sna so:som sq:sqi sr:srp ss:ssw st:sot su:sun sv:swe sw:swa ta:tam te:tel tg:tgk th:tha ti:tir
tk:tuk tl:tgl tn:tsn to:ton tr:tur ts:tso tt:tat tw:twi ty:tah ug:uig uk:ukr ur:urd uz:uzb ve:ven vi:vie vo:vol
wa:wln wo:wol xh:xho yi:yid yo:yor za:zha zh:zho zu:zul
sq:alb hy:arm eu:baq my:bur zh:chi cs:cze nl:dut fr:fre ka:geo de:ger el:gre is:ice mk:mac ms:may mi:mao fa:per
ro:rum sk:slo bo:tib cy:wel
"""
_SHORTEST = {three: two for two, three in (pair.split(":") for pair in _THREE_LETTERS.split())} | {"und": ""}


@functools.lru_cache(maxsize=1024)  # of the few of a corpus
def shortest_tag(tag: str) -> str:
    """The language tag with the shortest code of its language, as BCP 47 prescribes. Other text stays as it is.

    "eng" -> "en", "zho-Hant" -> "zh-Hant", "EN_US" -> "en-US", "kab" -> "kab", "und" (undetermined) -> ""
    """
    if (found := _CODE.match(tag)) is None:
        return tag
    code = found[0].lower()
    shortest = _SHORTEST.get(code, code)
    return shortest and shortest + tag[found.end() :].replace("_", "-")
