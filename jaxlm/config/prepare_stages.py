"""The settings of the stages of `jaxlm prepare`: each key's type, default and comment. See `schema.py`."""

import dataclasses
from typing import Annotated, Literal, get_args

from jaxlm.config.annotations import Count, Fraction, NotNegative, Pattern, Share, Size, at_least, key, within


@dataclasses.dataclass(frozen=True)
class HtmlSettings:
    """main text of pages; other documents pass"""

    markup: bool = key(True, '"#" before headings, fences around code, pipes in tables, "-" in lists; False: bare text')
    comments: bool = key(False, "keep what readers wrote below an article")
    min_chars: Count = key(40, "of main text, else the document goes")


@dataclasses.dataclass(frozen=True)
class DebrisSettings:
    """leftovers of careless HTML stripping; code and HTML pages pass"""


@dataclasses.dataclass(frozen=True)
class UnicodeSettings:
    """mojibake, NFC, line ends, white space, characters that do not show"""

    mojibake: bool = key(True, 'mend UTF-8 that was read as another encoding ("cafÃ©")')
    max_undecodable: Share = key(0.01, "share of characters that are U+FFFD; documents with more go")
    max_blank_lines: Count = key(2, "in a row")


@dataclasses.dataclass(frozen=True)
class LanguageSettings:
    """keeps documents in these languages; code passes"""

    languages: tuple[str, ...] = key(("en",), 'codes as the model has them; () = only note metadata["language_id"]')
    min_score: Share = key(0.5, "probability below which the language counts as uncertain, and the document goes")
    sample_chars: Annotated[int, at_least(100)] = key(600, "looked at, from beginning, middle and end")
    keep_doubtful: bool = key(False, "keep prose in doubt and texts without letters; name lists and tables always stay")
    model: str = key("", 'a fastText model file, such as lid.176.ftz; "" = py3langid')


@dataclasses.dataclass(frozen=True)
class GopherQualitySettings:
    """words of prose; limits of Gopher, as in datatrove; 0 = off; code passes"""

    min_words: Count = key(50, "in a document")
    max_words: Count = key(100000, "in a document")
    min_mean_word_length: NotNegative = key(3.0, "characters")
    max_mean_word_length: NotNegative = key(10.0, "characters")
    max_symbols_per_word: NotNegative = key(0.1, 'of "#", and of ellipses')
    max_bullet_lines: Share = key(0.9, "share of lines that begin with a bullet")
    max_ellipsis_lines: Share = key(0.3, "share of lines that end in an ellipsis")
    min_alphabetic_words: Share = key(0.8, "share of words (marks are words too) with a letter")
    min_stop_words: Count = key(2, "different ones")
    stop_words: tuple[str, ...] = key(("the", "be", "to", "of", "and", "that", "have", "with"), "of the language")


@dataclasses.dataclass(frozen=True)
class GopherRepetitionSettings:
    """what repeats itself within a document, by Gopher; 0 = off; code passes"""

    dup_line_frac: Share = key(0.3, "share of lines that have come before")
    dup_para_frac: Share = key(0.3, "the same of paragraphs")
    dup_line_char_frac: Share = key(0.2, "share of characters in such lines")
    dup_para_char_frac: Share = key(0.2, "share of characters in such paragraphs")
    top_2_gram: Share = key(0.2, "share of characters in the most frequent pair of words")
    top_3_gram: Share = key(0.18, "the same for 3 words")
    top_4_gram: Share = key(0.16, "the same for 4 words")
    dup_5_gram: Share = key(0.15, "share of characters in runs of 5 words that have come before")
    dup_6_gram: Share = key(0.14, "the same for runs of 6 words")
    dup_7_gram: Share = key(0.13, "the same for runs of 7 words")
    dup_8_gram: Share = key(0.12, "the same for runs of 8 words")
    dup_9_gram: Share = key(0.11, "the same for runs of 9 words")
    dup_10_gram: Share = key(0.1, "the same for runs of 10 words")


@dataclasses.dataclass(frozen=True)
class C4Settings:
    """C4's rules on lines, for web pages; code passes"""

    terminal_punctuation: bool = key(False, "lines must end in . ? ! or a quotation mark (C4; too much for FineWeb)")
    citations: bool = key(True, "[1] and [edit] go from their lines")
    min_sentences: Count = key(5, "in the lines that stay, else the document goes; 0 = off")
    min_words_per_line: Count = key(3, "headings are such lines too; 0 = off")
    max_word_length: Count = key(1000, "a line with a longer word goes; 0 = off")
    lorem_ipsum: bool = key(True, "documents with it go")
    javascript: bool = key(True, "lines with this word go")
    curly_bracket: bool = key(True, 'documents with "{" go: False for texts about programs')
    policy: bool = key(True, 'lines with "privacy policy", "uses cookies" ... go')


@dataclasses.dataclass(frozen=True)
class FineWebSettings:
    """FineWeb's rules against lists and leftovers of pages; code passes"""

    min_punctuated_lines: Share = key(0.12, "share of lines that end in . ? ! ...")
    max_short_lines: Share = key(0.67, "share of lines that are short; 1 = off")
    short_line_chars: Count = key(30, "up to this length a line is short")
    max_repeated_line_chars: Share = key(0.01, "share of characters in lines that have come before; 1 = off")
    max_newlines_per_word: NotNegative = key(0.3, "more is a list")


@dataclasses.dataclass(frozen=True)
class ClassifierSettings:
    """quality as two sets of examples show it; writes metadata["quality"]"""

    good: str = key("", "a folder or file of good examples (.txt, .jsonl, .parquet): hundreds or more")
    bad: str = key("", "and of bad ones")
    model: str = key("", "in place of both: the folder of a trained one (classifier.json, weights.npz)")
    min_score: Share = key(0.5, "probability of being good below which a document goes; 0 = only note it")
    chars: Count = key(4000, "looked at, from the beginning; a trained one has its own")


@dataclasses.dataclass(frozen=True)
class FunctionSettings:
    """a filter of your own: what it returns is metadata["score"]; True is 1, False 0"""

    path: str = key("", "FILE.py:FUNCTION or MODULE:FUNCTION; called with a document's text and its metadata (a dict)")
    min_score: Share = key(0.5, "a document with less goes; 0 = only note it")


@dataclasses.dataclass(frozen=True)
class ToxicitySettings:
    """profane and abusive lines"""

    min_score: Share = key(0.9, "probability (alt-profanity-check, English) from which a line is bad; 1 = off")
    words: str = key("", "a file of bad words and phrases, one a line; lines that hold one as a whole word are bad")
    max_bad_lines: Share = key(0.1, "share of lines beyond which the document goes")
    drop_lines: bool = key(True, "bad lines go from documents that stay")


@dataclasses.dataclass(frozen=True)
class CodeSettings:
    """source files that nobody wrote or reads; only documents of the format "code\""""

    parses: bool = key(True, "Python, JSON and TOML must parse (with the Python that runs this)")
    generated: bool = key(True, "files go whose head says that a program wrote them")
    max_line_chars: Count = key(1000, "longest line; 0 = off")
    max_mean_line_chars: NotNegative = key(100.0, "0 = off")
    max_data: Share = key(0.5, "share of characters in long tables of numbers or strings, base64, hexadecimal; 1 = off")
    min_alphabetic: Share = key(0.25, "share of letters")
    max_non_ascii: Share = key(0.5, "share of characters beyond ASCII; 1 = off")
    max_parse_chars: Count = key(1000000, "longer files are not parsed")


PersonalData = Literal["secret", "email", "iban", "card", "ssn", "ip", "mac", "phone"]


@dataclasses.dataclass(frozen=True)
class PiiSettings:
    """personal data becomes <EMAIL>, <PHONE>, ..., the same always"""

    kinds: tuple[PersonalData, ...] = key(get_args(PersonalData), "of personal data")
    regions: tuple[str, ...] = key(("US",), "ISO codes: phone numbers without country code, besides the language's")
    keep_emails: tuple[Pattern, ...] = key(
        (
            r".*@([\w-]+\.)*example\.(com|org|net|edu)",
            r"(git|hg|svn|no-?reply|do-?not-?reply)@.*",
            r".*@users\.noreply\.github\.com",
            r"(info|contact|kontakt|contato|contacto|support|help|helpdesk|service|sales|press|presse|office|security|abuse|bugs?|"
            r"feedback|hello|team|admin|root|(web|post|host|list)master|mailer-daemon|privacy|legal|jobs|billing|orders?)@.*",
            r"([\w.-]*[._-])?(devel|users|dev|announce|discuss|list|bugs|commits|patches|request|owner)@.*|[\w.-]+devel@.*",
            r".*@([\w-]+\.)*(lists?|mailman|groups|googlegroups)\..*",
            r".*@(your|my)-?(domain|company|site|host|server|organi[sz]ation|org|mail|email|isp|provider)\..*",
            r"(you|your[._-]?(name|email|address|mail)|name|someone|somebody|user(name)?|foo|nobody)@.*",
        ),
        "addresses that stay, such as those of roles and lists: regexes of the whole address, case aside",
    )


@dataclasses.dataclass(frozen=True)
class JunkSettings:
    """what `jaxlm audit` finds"""

    patterns: tuple[str, ...] = key(("annotation", "chat_tokens"), "groups in corpus/stages/junk_patterns.py, regexes")
    level: Literal["match", "line", "document"] = key("line", "what goes: match (alone) | line | document")
    min_hits: Size = key(1, "matches of a pattern in a document from which on it goes")


@dataclasses.dataclass(frozen=True)
class DecontaminateSettings:
    """documents that hold items of benchmarks go"""

    paths: tuple[str, ...] = key((), "benchmark files, folders, globs, URLs: jsonl(.gz, .zst), json, parquet")
    fields: tuple[str, ...] = key((), 'of files of unknown layout: ("riddles*.jsonl:body+question>answer+hint",)')
    ngram: Annotated[int, within(5, 127)] = key(13, "words compared at a time; fewer for items below twice this")
    min_words: Size = key(5, "of the shortest question that counts")
    coverage: Fraction = key(0.35, "share of a question or long answer that a document must hold; short ones whole")
    max_items: Count = key(20, "an n-gram that more items have is nobody's: instructions, licences")


@dataclasses.dataclass(frozen=True)
class ExactSettings:
    """the same text, spacing and case aside: one stays"""


@dataclasses.dataclass(frozen=True)
class NearSettings:
    """nearly the same text: MinHash finds candidates, their shingles' Jaccard similarity decides"""

    threshold: Share = key(0.6, "similarity from which one of two documents goes")
    ngram: Size = key(5, "words a shingle")
    bands: Size = key(20, "documents with all hashes of a band in common are compared")
    rows: Size = key(5, "hashes a band")


@dataclasses.dataclass(frozen=True)
class LinesSettings:
    """lines and paragraphs that come back in many documents"""

    min_documents: Size = key(10, "of a site that hold a line, from which on it goes from all of them,")
    min_share: Share = key(0.05, "if it is this share of the site's documents too")
    min_chars: Count = key(20, "shorter lines are left alone")
    min_paragraph_chars: Count = key(200, "a paragraph on one line, this long, that comes back stays once")
    max_removed: Share = key(1.0, "share of a document's characters beyond which what is left of it goes too; 1: never")


@dataclasses.dataclass(frozen=True)
class StagesConfig:
    """each stage's settings; a source may set its own: "gopher_quality min_words=30\""""

    html: HtmlSettings = HtmlSettings()
    debris: DebrisSettings = DebrisSettings()
    unicode: UnicodeSettings = UnicodeSettings()
    language: LanguageSettings = LanguageSettings()
    gopher_quality: GopherQualitySettings = GopherQualitySettings()
    gopher_repetition: GopherRepetitionSettings = GopherRepetitionSettings()
    c4: C4Settings = C4Settings()
    fineweb: FineWebSettings = FineWebSettings()
    classifier: ClassifierSettings = ClassifierSettings()
    function: FunctionSettings = FunctionSettings()
    toxicity: ToxicitySettings = ToxicitySettings()
    code: CodeSettings = CodeSettings()
    pii: PiiSettings = PiiSettings()
    junk: JunkSettings = JunkSettings()
    decontaminate: DecontaminateSettings = DecontaminateSettings()
    exact: ExactSettings = ExactSettings()
    near: NearSettings = NearSettings()
    lines: LinesSettings = LinesSettings()
