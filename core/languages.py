"""The languages that Whisper was trained on (Radford et al. 2022, appendix E): their codes (ISO 639) and English names,
as in the table of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

_TAG = re.compile(r"([a-z]{2,3})([-_][a-z]{4})?([-_]([a-z]{2}|[0-9]{3}))?")  # RFC 5646: language, script, region
_NAMES = """
af=afrikaans am=amharic ar=arabic as=assamese az=azerbaijani ba=bashkir be=belarusian bg=bulgarian bn=bengali
bo=tibetan br=breton bs=bosnian ca=catalan cs=czech cy=welsh da=danish de=german el=greek en=english es=spanish
et=estonian eu=basque fa=persian fi=finnish fo=faroese fr=french gl=galician gu=gujarati ha=hausa haw=hawaiian
he=hebrew hi=hindi hr=croatian ht=haitian_creole hu=hungarian hy=armenian id=indonesian is=icelandic it=italian
ja=japanese jw=javanese ka=georgian kk=kazakh km=khmer kn=kannada ko=korean la=latin lb=luxembourgish ln=lingala
lo=lao lt=lithuanian lv=latvian mg=malagasy mi=maori mk=macedonian ml=malayalam mn=mongolian mr=marathi ms=malay
mt=maltese my=myanmar ne=nepali nl=dutch nn=nynorsk no=norwegian oc=occitan pa=punjabi pl=polish ps=pashto
pt=portuguese ro=romanian ru=russian sa=sanskrit sd=sindhi si=sinhala sk=slovak sl=slovenian sn=shona so=somali
sq=albanian sr=serbian su=sundanese sv=swedish sw=swahili ta=tamil te=telugu tg=tajik th=thai tk=turkmen
tl=tagalog tr=turkish tt=tatar uk=ukrainian ur=urdu uz=uzbek vi=vietnamese yi=yiddish yo=yoruba yue=cantonese
zh=chinese
"""

_OTHER_NAMES = """
my=burmese es=castilian nl=flemish ht=haitian lb=letzeburgesch zh=mandarin ro=moldavian ro=moldovan pa=panjabi
ps=pushto si=sinhalese ca=valencian
"""

_LONG_CODES = """
af=afr am=amh ar=ara as=asm az=aze ba=bak be=bel bg=bul bn=ben bo=bod bo=tib br=bre bs=bos ca=cat cs=ces cs=cze cy=cym
cy=wel da=dan de=deu de=ger el=ell el=gre en=eng es=spa et=est eu=eus eu=baq fa=fas fa=per fi=fin fo=fao fr=fra fr=fre
gl=glg gu=guj ha=hau haw=haw he=heb hi=hin hr=hrv ht=hat hu=hun hy=hye hy=arm id=ind is=isl is=ice it=ita ja=jpn jw=jav
ka=kat ka=geo kk=kaz km=khm kn=kan ko=kor la=lat lb=ltz ln=lin lo=lao lt=lit lv=lav mg=mlg mi=mri mi=mao mk=mkd mk=mac
ml=mal mn=mon mr=mar ms=msa ms=may mt=mlt my=mya my=bur ne=nep nl=nld nl=dut nn=nno no=nor no=nob oc=oci pa=pan pl=pol
ps=pus pt=por ro=ron ro=rum ru=rus sa=san sd=snd si=sin sk=slk sk=slo sl=slv sn=sna so=som sq=sqi sq=alb sr=srp su=sun
sv=swe sw=swa ta=tam te=tel tg=tgk th=tha tk=tuk tl=tgl tl=fil tr=tur tt=tat uk=ukr ur=urd uz=uzb vi=vie yi=yid yo=yor
yue=yue zh=zho zh=chi zh=cmn
"""


def _pairs(table: str) -> Iterator[tuple[str, str]]:
    for pair in table.split():
        code, name = pair.split("=")
        yield code, name.replace("_", " ")


LANGUAGES: Mapping[str, str] = MappingProxyType(dict(_pairs(_NAMES)))
"""English names by code."""

LANGUAGE_CODES: Mapping[str, str] = MappingProxyType(
    {name: code for table in (_NAMES, _OTHER_NAMES) for code, name in _pairs(table)}
)
"""Codes by English name; some languages have several."""

LONG_CODES: Mapping[str, str] = MappingProxyType({long: code for code, long in _pairs(_LONG_CODES)})
"""Codes by the code of three letters (ISO 639-2, both kinds), which media files use."""


def language_code(language: str) -> str | None:
    """The code of a language that is given by its code ("en", "eng"), tag ("en-US"), English name or token; ``None`` if
    the table lacks the language."""
    name = language.strip().lower().removeprefix("<|").removesuffix("|>")
    tag = _TAG.fullmatch(name)
    name = name if tag is None else tag[1]
    return name if name in LANGUAGES else LANGUAGE_CODES.get(name) or LONG_CODES.get(name)


def is_language(spoken: str | None, wanted: str) -> bool:
    """True if both are the same language, however each is written."""
    names = [(language_code(one) or one.strip().lower()) for one in (spoken or "", wanted)]
    return names[0] == names[1]
