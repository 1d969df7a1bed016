import json
from pathlib import Path

import pytest

from eesd_lite.distill.texts import parse_line, read_samples, tokenize
from eesd_lite.errors import PrepareError


class Letters:
    """A codec of one token per letter; a chat is its contents with a mark before each."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def render_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        assert not add_generation_prompt
        return [i for m in messages for i in [0, *self.encode(m["content"])]]


def write(folder: Path, *lines: str) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_three_forms_of_a_sample_are_understood() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert parse_line(json.dumps({"messages": chat})) == chat
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    assert parse_line(json.dumps({"conversations": turns, "id": 7})) == chat
    assert parse_line('{"text": "plain"}') == "plain"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 3: not JSON"),
        ("[1]", "line 3: a JSON object is needed, not list"),
        ('{"prompt": "x"}', "line 3: no 'messages', 'conversations' or 'text'"),
        ('{"messages": []}', "line 3: the list of messages is empty"),
        ('{"messages": [{"role": "user"}]}', "line 3: message 1 has no text 'content'"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "line 3: message 1 has role 'robot'"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    path = write(tmp_path, '{"text": "one"}', "", line)
    with pytest.raises(PrepareError, match=complaint) as caught:
        read_samples(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_the_sample_count_stops_before_later_lines_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, '{"text": "one"}', '{"text": "two"}', "broken")
    assert read_samples(path, samples=2) == ["one", "two"]


def test_missing_empty_and_binary_files_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="cannot be read"):
        read_samples(tmp_path / "none.jsonl")
    with pytest.raises(PrepareError, match="no samples in it"):
        read_samples(write(tmp_path, "", ""))
    (tmp_path / "data.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PrepareError, match="not UTF-8"):
        read_samples(tmp_path / "data.jsonl")


def test_samples_are_cut_dropped_when_too_short_and_stopped_at_the_token_limit() -> None:
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    codec = Letters()
    found = tokenize(["abcdef", "x", chat, "yz"], codec, longest=4)  # type: ignore[arg-type,list-item]
    assert found == [[97, 98, 99, 100], [0, 97, 98, 0], [121, 122]]
    assert len(tokenize(["abc", "def", "ghi"], codec, longest=9, max_tokens=7)) == 2  # type: ignore[arg-type,list-item]
    with pytest.raises(PrepareError, match="1 usable samples"):
        tokenize(["abc", "d"], codec, longest=9)  # type: ignore[arg-type,list-item]
