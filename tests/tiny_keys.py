"""Keys of a config as a test writes them: words of key=value in one text."""


def keys(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


def words(text: str) -> list[str]:
    return text.split()
