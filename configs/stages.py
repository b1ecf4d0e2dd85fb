"""The keys of `prepare.stages` with their defaults and comments: what base.py says of the stages of `jaxlm prepare`."""

from ml_collections import ConfigDict


def cleaning(s: ConfigDict) -> None:
    """Stages that make text of pages and mend it."""
    s.html = h = ConfigDict()  # main text of pages; other documents pass
    h.markup = True  # "#" before headings, fences around code, pipes in tables, "-" in lists; False = bare text
    h.comments = False  # keep what readers wrote below an article
    h.min_chars = 40  # of main text, else the document goes

    s.debris = d = ConfigDict()  # leftovers of careless HTML stripping; code and HTML pages pass
    d.entities = True  # "&amp;nbsp;" "&#39;"
    d.tags = True  # "<br/>" "</div>" 'class="..."'
    d.styles = True  # lines of style sheets and of trackers' scripts
    d.menus = True  # "Home / About / Contact", on one line or on several; "Home > Docs > API"
    d.notices = True  # lines about cookies, newsletters, sharing
    d.max_mentions = 1  # of HTML, CSS ...: a text with more is about them, and keeps its tags and entities
    d.min_menu_lines = 3  # of menus' words, in a run of short lines
    d.max_menu_chars = 30  # of a short line
    d.max_notice_chars = 200  # a longer line is no notice

    s.unicode = u = ConfigDict()  # mojibake, NFC, line ends, white space, characters that do not show
    u.mojibake = True  # mend UTF-8 that was read as another encoding ("cafÃ©")
    u.max_undecodable = 0.01  # share of characters that are U+FFFD; documents with more go
    u.max_blank_lines = 2  # in a row


def published_rules(s: ConfigDict) -> None:
    """Stages by the rules of published corpora."""
    s.language = lang = ConfigDict()  # keeps documents in these languages; code passes
    lang.languages = ("en",)  # codes as the model gives them; () = only note it in metadata["language_id"]
    lang.min_score = 0.5  # probability below which the language counts as uncertain, and the document goes
    lang.sample_chars = 600  # looked at, from beginning, middle and end
    lang.keep_doubtful = False  # keep texts whose language is uncertain, or that have none: tables, lists of names
    lang.model = ""  # a fastText model file, such as lid.176.ftz; "" = py3langid

    s.gopher_quality = q = ConfigDict()  # words of prose; limits of Gopher, as in datatrove; 0 = off; code passes
    q.min_words = 50  # in a document
    q.max_words = 100000  # in a document
    q.min_mean_word_length = 3.0  # characters
    q.max_mean_word_length = 10.0  # characters
    q.max_symbols_per_word = 0.1  # of "#", and of ellipses
    q.max_bullet_lines = 0.9  # share of lines that begin with a bullet
    q.max_ellipsis_lines = 0.3  # share of lines that end in an ellipsis
    q.min_alphabetic_words = 0.8  # share of words (marks are words too) with a letter
    q.min_stop_words = 2  # different ones
    q.stop_words = ("the", "be", "to", "of", "and", "that", "have", "with")  # of the language

    s.gopher_repetition = r = ConfigDict()  # what repeats itself within a document, by Gopher; 0 = off; code passes
    r.dup_line_frac = 0.3  # share of lines that have come before
    r.dup_para_frac = 0.3  # the same of paragraphs
    r.dup_line_char_frac = 0.2  # share of characters in such lines
    r.dup_para_char_frac = 0.2  # share of characters in such paragraphs
    r.top_2_gram = 0.2  # share of characters in the most frequent pair of words
    r.top_3_gram = 0.18  # the same for 3 words
    r.top_4_gram = 0.16  # the same for 4 words
    r.dup_5_gram = 0.15  # share of characters in runs of 5 words that have come before
    r.dup_6_gram = 0.14  # the same for runs of 6 words
    r.dup_7_gram = 0.13  # the same for runs of 7 words
    r.dup_8_gram = 0.12  # the same for runs of 8 words
    r.dup_9_gram = 0.11  # the same for runs of 9 words
    r.dup_10_gram = 0.1  # the same for runs of 10 words

    s.c4 = c4 = ConfigDict()  # C4's rules on lines, for web pages; code passes
    c4.terminal_punctuation = False  # lines must end in . ? ! or a quotation mark (C4 did; FineWeb found it too much)
    c4.citations = True  # [1] and [edit] go from their lines
    c4.min_sentences = 5  # in the lines that stay, else the document goes; 0 = off
    c4.min_words_per_line = 3  # headings are such lines too; 0 = off
    c4.max_word_length = 1000  # a line with a longer word goes; 0 = off
    c4.lorem_ipsum = True  # documents with it go
    c4.javascript = True  # lines with this word go
    c4.curly_bracket = True  # documents with "{" go: False for texts about programs
    c4.policy = True  # lines with "privacy policy", "uses cookies" ... go

    s.fineweb = f = ConfigDict()  # FineWeb's rules against lists and leftovers of pages; code passes
    f.min_punctuated_lines = 0.12  # share of lines that end in . ? ! ...
    f.max_short_lines = 0.67  # share of lines that are short; 1 = off
    f.short_line_chars = 30  # up to this length a line is short
    f.max_repeated_line_chars = 0.01  # share of characters in lines that have come before; 1 = off
    f.max_newlines_per_word = 0.3  # more is a list


def judges(s: ConfigDict) -> None:
    """Stages that ask a model or a parser."""
    s.classifier = cl = ConfigDict()  # quality as two sets of examples show it; writes metadata["quality"]
    cl.good = ""  # a folder or file of good examples (.txt, .jsonl, .parquet): hundreds or more
    cl.bad = ""  # and of bad ones
    cl.model = ""  # in place of both: the folder of a trained one (classifier.json, weights.npz)
    cl.min_score = 0.5  # probability of being good below which a document goes; 0 = only note it
    cl.chars = 4000  # looked at, from the beginning; a trained one has its own

    s.function = fn = ConfigDict()  # a filter of your own: what it returns is metadata["score"]; True is 1, False 0
    fn.path = ""  # FILE.py:FUNCTION or MODULE:FUNCTION; called with a document's text and its metadata (a dict)
    fn.min_score = 0.5  # a document with less goes; 0 = only note it

    s.toxicity = tox = ConfigDict()  # profane and abusive lines
    tox.min_score = 0.9  # probability (alt-profanity-check, English) from which a line is bad; 1 = off
    tox.words = ""  # a file of bad words and phrases, one a line; a line that holds one as a word of its own is bad
    tox.max_bad_lines = 0.1  # share of lines beyond which the document goes
    tox.drop_lines = True  # bad lines go from documents that stay

    s.code = co = ConfigDict()  # source files that nobody wrote or reads; only documents of the format "code"
    co.parses = True  # Python, JSON and TOML must parse (with the Python that runs this)
    co.generated = True  # files go whose head says that a program wrote them
    co.max_line_chars = 1000  # longest line; 0 = off
    co.max_mean_line_chars = 100.0  # 0 = off
    co.max_data = 0.5  # share of characters in long tables of numbers or strings, base64, hexadecimal; 1 = off
    co.min_alphabetic = 0.25  # share of letters
    co.max_non_ascii = 0.5  # share of characters beyond ASCII; 1 = off
    co.max_parse_chars = 1000000  # longer files are not parsed


def guards(s: ConfigDict) -> None:
    """Stages against what a model must not learn."""
    s.pii = ConfigDict()  # personal data becomes <EMAIL>, <PHONE>, ..., the same always
    s.pii.kinds = ("secret", "email", "iban", "card", "ssn", "ip", "phone")  # of personal data
    s.pii.regions = ("US",)  # whose phone numbers are known without "+" and country code; ISO codes
    s.pii.keep_emails = (  # addresses that stay: regexes of the whole address, case aside
        r".*@([\w-]+\.)*example\.(com|org|net|edu)",
        r"(git|hg|svn|no-?reply|do-?not-?reply)@.*",
        r".*@users\.noreply\.github\.com",
    )

    s.junk = ConfigDict()  # what `jaxlm audit` finds
    s.junk.patterns = ("annotation", "chat_tokens")  # groups of jaxlm/corpus/audit_patterns.py, regular expressions
    s.junk.level = "line"  # what goes: match (alone) | line | document
    s.junk.min_hits = 1  # matches of a pattern in a document from which on it goes

    s.decontaminate = dc = ConfigDict()  # documents that hold items of benchmarks go
    dc.paths = ()  # benchmark files, folders, globs, URLs: jsonl(.gz, .zst), json, parquet
    dc.fields = ()  # of files whose layout jaxlm does not know: ("riddles*.jsonl:body+question>answer+hint",)
    dc.ngram = 13  # words compared at a time; fewer for items that are shorter than twice this
    dc.min_words = 5  # of the shortest question that counts
    dc.coverage = 0.35  # share of a question, or of a long answer, that a document must hold; short ones must be whole
    dc.max_items = 20  # an n-gram that more items have is nobody's: instructions, licences


def deduplication(s: ConfigDict) -> None:
    """Stages that look at all documents together."""
    s.exact = ConfigDict()  # the same text, spacing and case aside: one stays
    s.near = ConfigDict()  # nearly the same text: MinHash finds candidates, their shingles' Jaccard similarity decides
    s.near.threshold = 0.6  # similarity from which one of two documents goes
    s.near.ngram = 5  # words a shingle
    s.near.bands = 20  # documents with all hashes of a band in common are compared
    s.near.rows = 5  # hashes a band
    s.lines = ConfigDict()  # lines and paragraphs that come back in many documents
    s.lines.min_documents = 10  # of a site that hold a line, from which on it goes from all of them,
    s.lines.min_share = 0.05  # if it is this share of the site's documents too
    s.lines.min_chars = 20  # shorter lines are left alone
    s.lines.min_paragraph_chars = 200  # a paragraph on one line, this long, that comes back stays once
    s.lines.max_removed = 0.5  # share of a document's characters beyond which what is left of it goes too
