"""The arguments of a template, and the names by which one of them is its text, in many languages."""

import functools
import re

from data_pipeline.text.wikitext.namespaces import names

# Names of the argument with the text that a template shows, and of the one that a quotation shows.
TEXT_NAMES = names(
    """
    text label lt quotetext content
    texto texte testo tekst teksti tekstas teksts teksto textus szöveg metin inhalt inhoud contenu contenido conteúdo
    contenuto conținut treść indhold innehåll innhold sisältö obsah tartalom içerik teks isi nội_dung
    текст содержание содержимое зміст вміст съдържание κείμενο
    نص النص متن טקסט תוכן
    テキスト 本文 文 文本 正文 文字 内容 內容 텍스트 내용
    """
)
QUOTATION_NAMES = TEXT_NAMES | names(
    """
    quote quotation
    citation zitat cita citazione citação citaat citat citát cytat citació sitat sitaatti lainaus idézet alıntı aipamen
    navedek kutipan trích_dẫn цитата цитат цытата παράθεση اقتباس نقل_قول ציטוט 引用 引用文 引文 引言 인용 인용문
    """
)
_QUOTES = re.compile(
    r"quot|\b(?:zitat|cita(?:[atçzc]|$)|citát|cytat|sitaa?t|lainaus|idézet|alıntı|aipamen|navedek|kutipan|trích dẫn)|"
    r"\b(?:цитат|цытат|παράθεση|اقتباس|نقل قول|ציטוט)|引用|引文|引言|인용"
)
_NAME = re.compile(r"[\w\s.-]*")
_NUMBERS = "123456789"


class Arguments(list[str]):
    """The positional arguments of a template: unnamed ones in order, and numbered ones ("1=") at their positions.

    `named`: all other arguments, by their names in lower case.
    """

    def __init__(self) -> None:
        super().__init__()
        self.named: dict[str, str] = {}

    def text(self, names: frozenset[str] = TEXT_NAMES) -> str:
        """The first argument that has one of these names; "" if there is none."""
        return next((value for name, value in self.named.items() if value and name in names), "")


def arguments_of(rest: str) -> Arguments:
    """The arguments of a template; `rest` is the template without its name.

    "a|x=1|b"  ->  ["a", "b"], named {"x": "1"}        "2=b|1=a"  ->  ["a", "b"]        "2=b"  ->  ["", "b"]
    """
    arguments = Arguments()
    for argument in rest.split("|"):
        name, equals, value = argument.partition("=")
        if not equals or not _NAME.fullmatch(name):  # "x > 1 = true" has an equals sign but no name
            arguments.append(argument.strip())
        else:
            arguments.named[normalised(name)] = value.strip()
    for position, number in enumerate(_NUMBERS if arguments.named else ""):
        if number in arguments.named:
            arguments += [""] * (position - len(arguments))
            arguments[position : position + 1] = [arguments.named.pop(number)]
    return arguments


def normalised(name: str) -> str:
    """ "Lang_Fr "  ->  "lang fr" """
    return name.replace("_", " ").strip().lower()


@functools.lru_cache(maxsize=1 << 12)
def is_quotation(name: str) -> bool:
    """Whether the normalised name of a template means a quotation, in one of many languages."""
    return _QUOTES.search(name) is not None and not name.startswith(("cite", "cita "))


def named_quotation(source: str) -> str:
    """The named text of a template that quotes; "" if its text has no name.

    "Quote-la|text=Veni|author=C"  ->  a line "Veni"        "Quote request|date=May"  ->  ""
    """
    text = arguments_of(source.partition("|")[2]).text(QUOTATION_NAMES)
    return f"\n{text}\n" if text else ""
