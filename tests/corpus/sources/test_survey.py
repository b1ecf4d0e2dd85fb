"""Files that are not read are told with what to do about them."""

from jaxlm.corpus.sources import survey


def test_files_without_a_suffix_are_told_how_to_be_read(tmp_path):
    for name in ("LICENCE", "NOTES", "a.txt", "b.png"):
        (tmp_path / name).write_text("some words")
    found = survey.survey(str(tmp_path), ())
    assert found.files == {"text": 1}
    assert survey.unread_lines("docs", found.unread) == [
        "docs: 2 no suffix files are not read: name those that are text NAME.txt",
        "docs: 1 .png file is in no supported format",
    ]
