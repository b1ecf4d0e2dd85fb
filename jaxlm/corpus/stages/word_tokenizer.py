"""Gives datatrove's filters the words and sentences of `jaxlm.corpus.words`: `SomeFilter(language=TOKENIZER)`."""

from datatrove.utils.word_tokenizers import WordTokenizer

from jaxlm.corpus import words


class RegexTokenizer(WordTokenizer):
    """A datatrove tokenizer that calls the functions of `jaxlm.corpus.words`."""

    def word_tokenize(self, text: str) -> list[str]:
        return words.split(text)

    def sent_tokenize(self, text: str) -> list[str]:
        return [text[a:b].strip() for a, b in self.span_tokenize(text)]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        ends = words.sentence_ends(text)
        return list(zip([0, *ends[:-1]], ends, strict=True))


TOKENIZER = RegexTokenizer()
