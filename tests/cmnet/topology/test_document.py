"""Strict YAML and presets as differences."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.errors import InputError
from cmnet.topology import document


def write(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return str(file)


def read_data(folder: Path, text: str) -> dict[str, object]:
    return document.read(write(folder, "t.yaml", text)).data


def test_plain_values_mean_what_they_say(tmp_path: Path) -> None:
    """YAML 1.1 would read 8, 90, False, 1000, a date and False here."""
    text = "a: 010\nb: 1:30\nc: no\nd: 1_000\ne: 2026-01-02\nf: off\ng: 0x10\n"
    expected = ["010", "1:30", "no", "1_000", "2026-01-02", "off", "0x10"]
    assert list(read_data(tmp_path, text).values()) == expected


def test_numbers_booleans_and_null_are_read(tmp_path: Path) -> None:
    """The JSON-like rest."""
    text = "a: 10\nb: -3\nc: true\nd: false\ne: null\nf:\ng: 1.5\nh: '7'\n"
    expected = [10, -3, True, False, None, None, 1.5, "7"]
    assert list(read_data(tmp_path, text).values()) == expected


MALFORMED = [
    ("a: 1\nb: 2\na: 3\n", "line 3, column 1", "the key 'a' given twice"),
    ("a: {b: 1, b: 2}\n", "line 1, column 11", "the key 'b' given twice"),
    ("a: &x 1\nb: *x\n", "line 1, column 4", "an anchor or alias"),
    ("a: *x\n", "line 1, column 4", "an anchor or alias"),
    ("1: a\n", "line 1, column 1", "a key that is no text"),
    ("true: a\n", "line 1, column 1", "a key that is no text"),
    ("[a]: b\n", "line 1, column 1", "a key that is no text"),
    ("a: !!python/object:os.system x\n", "line 1, column 4", "could not determine a constructor"),
    ("a: [1\n", "line 2, column 1", "expected ',' or ']'"),
    ("a: b: c\n", "line 1, column 5", "mapping values are not allowed here"),
    ("\ta: 1\n", "line 1, column 1", "cannot start any token"),
    ("a: 1\n---\nb: 2\n", "line 2, column 1", "but found another document"),
    ("a: \0\n", "", "special characters are not allowed"),
    ("a: " + "9" * 5000 + "\n", "", "digits"),
    ("a: " + "[" * 600 + "]" * 600 + "\n", "", "recursion"),
]


@pytest.mark.parametrize(("text", "key", "problem"), MALFORMED)
def test_malformed_yaml_is_refused_with_its_place(
    tmp_path: Path, text: str, key: str, problem: str
) -> None:
    """A repeated key, for one, would silently lose the first value."""
    with pytest.raises(InputError) as caught:
        read_data(tmp_path, text)
    assert caught.value.key == key
    assert problem in str(caught.value)
    assert "well-formed YAML" in caught.value.expected


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet="ab:{}[],-#&*!|>'\"%@` \n\t\0~01", max_size=30))
def test_any_text_is_a_mapping_or_refused(text: str) -> None:
    """No other exception gets out of the parser."""
    try:
        data = document.parse("t.yaml", text)
    except InputError:
        return
    assert isinstance(data, dict)


NO_MAPPING = [
    ("", "an empty file"),
    ("# only a comment\n", "an empty file"),
    ("- a\n- b\n", "['a', 'b']"),
    ("text\n", "'text'"),
    ("7\n", "7"),
]


@pytest.mark.parametrize(("text", "shown"), NO_MAPPING)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, shown: str) -> None:
    """Says what was found."""
    with pytest.raises(InputError, match="expected a mapping with the keys name") as caught:
        read_data(tmp_path, text)
    assert shown in str(caught.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """OSError never gets through."""
    cases = [
        (str(tmp_path / "absent.yaml"), "No such file or directory"),
        (str(tmp_path), "Is a directory"),
        ("a\0b", "null byte"),
    ]
    for file, problem in cases:
        with pytest.raises(InputError, match=problem) as caught:
            document.read(file)
        assert caught.value.file == file


def test_bytes_that_are_no_utf8_are_refused(tmp_path: Path) -> None:
    """Named with their place, since an editor shows it."""
    file = tmp_path / "latin.yaml"
    file.write_bytes(b"name: caf\xe9\n")
    with pytest.raises(InputError, match="byte 0xe9 at offset 9 is wrong; expected text in UTF-8"):
        document.read(str(file))


def test_a_file_far_too_large_is_not_parsed(tmp_path: Path) -> None:
    """A trace given by mistake would take minutes in the YAML parser."""
    file = write(tmp_path, "large.yaml", "a: 1\n" * 300_000)
    with pytest.raises(InputError, match="more than 1 MiB"):
        document.read(file)


def test_base_is_merged_key_by_key(tmp_path: Path) -> None:
    """Mappings merge at any depth, lists and plain values are replaced."""
    write(tmp_path, "base.yaml", "name: b\nx: {y: {z: 1, w: 2}, l: [1, 2]}\n")
    file = write(tmp_path, "top.yaml", "base: base.yaml\nname: t\nx: {y: {z: 3}, l: [9]}\nq: 4\n")
    expected = {"name": "t", "x": {"y": {"z": 3, "w": 2}, "l": [9]}, "q": 4}
    assert document.read(file).data == expected


def test_a_number_is_replaced_whole(tmp_path: Path) -> None:
    """A new value must not keep the old source."""
    write(tmp_path, "base.yaml", 'r: {value: "1 us", kind: published, source: paper}\n')
    file = write(tmp_path, "top.yaml", 'base: base.yaml\nr: {value: "2 us"}\n')
    assert document.read(file).data == {"r": {"value": "2 us"}}


def test_bases_chain_and_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    """Wherever the command runs."""
    (tmp_path / "deep").mkdir()
    write(tmp_path, "a.yaml", "n: a\nx: 1\n")
    write(tmp_path / "deep", "b.yaml", "base: ../a.yaml\nn: b\n")
    file = write(tmp_path, "c.yaml", "base: deep/b.yaml\ny: 2\n")
    assert document.read(file).data == {"n": "b", "x": 1, "y": 2}


def test_text_holds_the_merged_data(tmp_path: Path) -> None:
    """A run keeps it: it must load alone, to the same data."""
    write(tmp_path, "base.yaml", "name: b\nx: {y: '010', z: ü}\n")
    merged = document.read(write(tmp_path, "top.yaml", "base: base.yaml\nname: t\n"))
    again = document.read(write(tmp_path, "again.yaml", merged.text))
    assert again.data == merged.data
    assert "base" not in again.data


def test_text_without_base_is_the_file(tmp_path: Path) -> None:
    """Comments and all."""
    file = write(tmp_path, "t.yaml", "# why\nname: t\n")
    assert document.read(file).text == "# why\nname: t\n"


WRONG_BASES = [
    ("base: 7", "expected the name of another file"),
    ("base: ''", "expected the name of another file"),
    ("base: absent.yaml", "expected an existing file, relative to"),
    ("base: .", "expected an existing file, relative to"),
    ('base: "a\\0b"', "expected an existing file, relative to"),
    ("base: top.yaml", "expected a file not based on this one"),
    ("base: other.yaml", "expected a file not based on this one"),
]


@pytest.mark.parametrize(("line", "expected"), WRONG_BASES)
def test_a_wrong_base_is_refused(tmp_path: Path, line: str, expected: str) -> None:
    """Also circles, directly or over another file."""
    write(tmp_path, "other.yaml", "base: top.yaml\n")
    with pytest.raises(InputError, match=expected) as caught:
        document.read(write(tmp_path, "top.yaml", line + "\n"))
    assert caught.value.key == "base"


def test_an_error_names_the_file_that_gave_the_key(tmp_path: Path) -> None:
    """A preset is not blamed for what its base says, nor the other way round."""
    base = write(tmp_path, "base.yaml", "x: {y: 1, z: 2}\nw: [3, 4]\n")
    top = write(tmp_path, "top.yaml", "base: base.yaml\nx: {z: 5}\n")
    merged = document.read(top)
    blamed = {key: merged.error(key, "more").file for key in ("x.y", "x.z", "x.v", "w[1]", "q")}
    assert blamed == {"x.y": base, "x.z": top, "x.v": top, "w[1]": base, "q": top}
    assert merged.error("w[1]", "more").value == 4
    assert str(merged.error("q", "more")) == f"{top}: q: (missing) is wrong; expected more"


def test_long_values_are_cut_in_messages(tmp_path: Path) -> None:
    """A message is read, not scrolled."""
    merged = document.read(write(tmp_path, "t.yaml", "x: " + "a" * 500 + "\n"))
    assert len(str(merged.error("x", "less"))) < 80 + len(str(tmp_path)) + 60
