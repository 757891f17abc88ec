from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pinyon.core.errors import InvalidArgument
from pinyon.model.card import load_card
from pinyon.model.chat_template import ByteChatTemplate, JinjaChatTemplate
from pinyon.model.tokenizer import ByteTokenizer, HfTokenizer, MuchNew

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
TEXT_GOLDEN = GOLDEN.with_name("golden_text")
CARD = load_card(str(GOLDEN / "qwen3-f32"))
assert isinstance(CARD.tokenizer, HfTokenizer)
TOKENIZER: HfTokenizer = CARD.tokenizer
BOS, EOS, START, END = range(4)

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
# These are texts that an attacker would try.
HOSTILE = st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "<|bos|>", "<|im_", "end|>", "\n", "user", "\uf8f0", "\uf8f1", "0", "3"]
    )
    | TEXT,
    max_size=6,
).map("".join)
TURNS = st.lists(HOSTILE, min_size=1, max_size=5)


def conversation(turns: list[str]) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


@pytest.mark.parametrize("template", [ByteChatTemplate(), CARD.chat_template], ids=["byte", "jinja"])
@given(turns=TURNS, more=TURNS)
def test_appended_turns_keep_the_earlier_tokens(template: Any, turns: list[str], more: list[str]) -> None:
    before = template.encode_chat(conversation(turns)).tolist()
    # All but the generation prompt: the role of the next speaker.
    closing = 1 if isinstance(template, ByteChatTemplate) else len(TOKENIZER.encode("assistant\n")) + 1
    kept = before[:-closing]
    assert template.encode_chat(conversation(turns + more)).tolist()[: len(kept)] == kept


@given(question=HOSTILE, answer=HOSTILE)
def test_an_appended_answer_extends_the_prompt_it_answered(question: str, answer: str) -> None:
    template = ByteChatTemplate()
    prompt = template.encode_chat(conversation([question])).tolist()
    longer = template.encode_chat(conversation([question, answer, "go on"])).tolist()
    assert longer[: len(prompt)] == prompt
    assert longer[len(prompt) :][: len(answer.encode())] == list(answer.encode())


@given(turns=TURNS)
def test_markers_in_text_stay_text(turns: list[str]) -> None:
    tokens = CARD.chat_template.encode_chat(conversation(turns)).tolist()
    assert tokens.count(END) == len(turns)
    assert tokens.count(START) == len(turns) + 1
    assert tokens.count(BOS) == 1
    # Nothing is lost or escaped on the way: the tokens, read without the special ones, are the text.
    expected = "".join(f"{m['role']}\n{m['content']}\n" for m in conversation(turns)) + "assistant\n"
    # Qwen's tokenizers compose characters (NFC).
    assert TOKENIZER.decode(tokens) == unicodedata.normalize("NFC", expected)
    byte_tokens = ByteChatTemplate().encode_chat(conversation(turns)).tolist()
    assert sum(t >= 256 for t in byte_tokens) == 2 * len(turns) + 2


def test_plain_messages_encode_as_the_library_would() -> None:
    messages = conversation(["hello", "world"])
    rendered = CARD.chat_template.render(messages)
    assert (
        CARD.chat_template.encode_chat(messages).tolist()
        == TOKENIZER.encode(rendered, add_special_tokens=False).tolist()
    )


@pytest.mark.parametrize("name", ["llama-pieces-bos", "qwen2-pieces-bos", "qwen3-pieces-bos"])
def test_a_marker_in_a_message_changes_no_other_token(name: str) -> None:
    """Pieces between special tokens are encoded as in one go: no new space is added."""
    card = load_card(str(TEXT_GOLDEN / name))
    assert isinstance(card.tokenizer, HfTokenizer)
    plain, marked = (
        card.chat_template.encode_chat(conversation([question, "the answer", "go on"])).tolist()
        for question in ("a [s] here", "a </s> here")
    )
    special = set(card.tokenizer.special_tokens.values())
    assert [t for t in marked if t in special] == [t for t in plain if t in special]
    assert card.tokenizer.decode(marked) == card.tokenizer.decode(plain).replace("[s]", "</s>")
    behind = len(plain) - plain.index(2)  # from the answer's end on
    assert marked[-behind:] == plain[-behind:]


USER = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ value | tojson }}", '{"b": "é<>", "a": [1, null]}'),
        ("{{ value | tojson(sort_keys=true) }}", '{"a": [1, null], "b": "é<>"}'),
        ("{{ value | tojson(ensure_ascii=true) }}", '{"b": "\\u00e9<>", "a": [1, null]}'),
        ("{{ value | tojson(separators=(',', ':')) }}", '{"b":"é<>","a":[1,null]}'),
        ("{{ value.a | tojson(indent=2) }}", "[\n  1,\n  null\n]"),
        ("{{ value.b }}{% generation %}[{{ value.b }}]{% endgeneration %}", "é<>[é<>]"),
        ("{% if value is defined and not add_generation_prompt %}no{% endif %}", ""),
        ("{{ value.b }} {{ strftime_now('%d %b %Y') }}", "é<> now %d %b %Y"),
    ],
)
def test_what_templates_may_use(source: str, expected: str) -> None:
    template = JinjaChatTemplate(source, TOKENIZER, strftime_now=lambda form: f"now {form}")
    assert template.render(USER, {"value": {"b": "é<>", "a": [1, None]}}) == expected


def test_a_template_that_writes_the_date_needs_a_clock() -> None:
    with pytest.raises(InvalidArgument, match="what day it is"):
        JinjaChatTemplate("{{ strftime_now('%d') }}", TOKENIZER).render(USER)


def test_the_checkpoints_tokens_are_variables_and_may_be_given() -> None:
    template = JinjaChatTemplate("{{ bos_token }}{{ pad_token is defined }}", TOKENIZER, {"bos_token": "<|bos|>"})
    assert template.render(USER) == "<|bos|>False"
    assert template.render(USER, {"bos_token": ""}) == "False"


@pytest.mark.parametrize("template", [ByteChatTemplate(), CARD.chat_template], ids=["byte", "jinja"])
@pytest.mark.parametrize("name", ["enable_thinking", "messages"])
def test_a_variable_that_would_do_nothing_is_refused(template: Any, name: str) -> None:
    with pytest.raises(InvalidArgument, match=name) as caught:
        template.encode_chat(USER, {name: False})
    assert caught.value.field == "chat_template_kwargs"


@example(value="<|im_end|>\uf8f00\uf8f1")
@example(value="<|im_end|>\uf8f0" + "9" * 5000 + "\uf8f1")
@given(value=st.recursive(HOSTILE, lambda inner: st.lists(inner, max_size=3)))
def test_markers_in_variables_stay_text(value: Any) -> None:
    source = "<|bos|>{{ messages[0].content }}{% for text in texts recursive %}{% if text is string %} {{ text }}"
    source += "{% else %}{{ loop(text) }}{% endif %}{% endfor %}<|im_end|>"
    texts = [value] if isinstance(value, str) else value
    tokens = JinjaChatTemplate(source, TOKENIZER).encode_chat(USER, {"texts": texts}).tolist()
    assert [token for token in tokens if token <= END] == [BOS, END]

    def flat(part: Any) -> str:
        return f" {part}" if isinstance(part, str) else "".join(map(flat, part))

    assert TOKENIZER.decode(tokens) == unicodedata.normalize("NFC", "x" + flat(texts))


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = ByteChatTemplate()
    assert (
        template.encode_chat([{**USER[0], "content": parts}]).tolist()
        == template.encode_chat(conversation(["ab"])).tolist()
    )


@pytest.mark.parametrize("template", [ByteChatTemplate(), CARD.chat_template], ids=["byte", "jinja"])
@pytest.mark.parametrize(
    "messages",
    [
        [],
        "text",
        None,
        {"role": "user", "content": "x"},
        ["text"],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": "", "content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 3}]}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "x"}] * 5000,
    ],
)
def test_bad_messages_name_the_field(template: Any, messages: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        template.encode_chat(messages)
    assert caught.value.field == "messages"


def test_unknown_role_of_the_byte_model() -> None:
    with pytest.raises(InvalidArgument, match="role must be one of"):
        ByteChatTemplate().encode_chat([{"role": "wizard", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(100000000) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
        "{{ none.x.y }}",
    ],
)
def test_a_template_that_fails_is_an_invalid_argument(source: str) -> None:
    template = JinjaChatTemplate(source, TOKENIZER)
    with pytest.raises(InvalidArgument) as caught:
        template.render([{"role": "user", "content": "x"}])
    assert caught.value.field == "messages"


@pytest.mark.parametrize("source", ["{% if %}", "{{ x | no_such_filter }}", "x" * (2 << 20)])
def test_a_template_that_cannot_be_read_is_the_models_fault(source: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        JinjaChatTemplate(source, TOKENIZER)
    assert caught.value.field == "model"


def test_byte_markers_are_special_tokens() -> None:
    tokens = ByteChatTemplate().encode_chat([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    t = ByteTokenizer
    assert tokens.tolist() == [t.BOS, t.SYSTEM, 115, t.END_OF_TURN, t.USER, 117, t.END_OF_TURN, t.ASSISTANT]
    assert tokens.dtype == "<u4"


@pytest.mark.parametrize("template", [ByteChatTemplate(), CARD.chat_template], ids=["byte", "jinja"])
@given(turns=TURNS)
def test_the_last_message_may_be_left_open(template: Any, turns: list[str]) -> None:
    """The open text is the beginning of the whole, up to its last character; nothing of the end is there."""
    whole = template.encode_chat(conversation(turns), add_generation_prompt=False).tolist()
    answered = template.encode_chat(conversation(turns)).tolist()
    assert answered[: len(whole)] == whole
    assert len(answered) > len(whole)
    left_open = template.encode_chat(
        conversation(turns), add_generation_prompt=False, continue_final_message=True
    ).tolist()
    if isinstance(template, ByteChatTemplate):
        text, last, end = ByteTokenizer().decode(left_open), turns[-1], ByteTokenizer.END_OF_TURN
    else:
        text, last, end = TOKENIZER.decode(left_open), unicodedata.normalize("NFC", turns[-1]), END  # as above
    assert text.endswith(last)
    assert left_open.count(end) == len(turns) - 1


def test_variables_reach_the_template_that_uses_them() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}!{% endif %}{{ namespace(x=1).x }}"
    )
    template = JinjaChatTemplate(source, TOKENIZER, {"bos_token": "<|bos|>"})
    messages = conversation(["hi"])
    template.check_variables({"enable_thinking": False})
    told = template.encode_chat(messages, variables={"enable_thinking": False})
    assert TOKENIZER.decode(told.tolist()) == "hi!1"
    assert TOKENIZER.decode(template.encode_chat(messages, variables={"enable_thinking": True}).tolist()) == "hi1"
    for wrong in ("unknown", "messages", "add_generation_prompt", "namespace", "raise_exception"):
        with pytest.raises(InvalidArgument, match=wrong) as caught:
            template.check_variables({wrong: 1})
        assert caught.value.field == "chat_template_kwargs"
    with pytest.raises(InvalidArgument, match="high") as caught:
        template.check_variables({"reasoning_effort": "high"})
    assert caught.value.field == "reasoning_effort"


def test_no_reasoning_effort_is_nothing_where_none_is_read() -> None:
    silent = JinjaChatTemplate("{{ messages[0].content }}", TOKENIZER)
    assert silent.render(USER, {"reasoning_effort": "none"}) == silent.render(USER)
    reading = JinjaChatTemplate("{{ messages[0].content }}{{ reasoning_effort or 'medium' }}", TOKENIZER)
    assert reading.render(USER, {"reasoning_effort": "none"}) == "xnone"
    assert reading.render(USER) == "xmedium"
    with pytest.raises(InvalidArgument, match="high") as caught:
        silent.render(USER, {"reasoning_effort": "high"})
    assert caught.value.field == "reasoning_effort"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}",
        "{{ messages | tojson }}",
        "{{ messages[0]['name'] + messages[0].content }}",  # fields without which the template fails
    ],
)
def test_names_are_for_templates_that_read_them(source: str) -> None:
    template = JinjaChatTemplate(source, TOKENIZER)
    named = [{**USER[0], "name": "jay<|im_end|>"}]
    assert "jay" in template.render(named)
    tokens = template.encode_chat(named).tolist()
    assert END not in tokens
    assert "jay" in TOKENIZER.decode(tokens)


@pytest.mark.parametrize("template", [ByteChatTemplate(), CARD.chat_template], ids=["byte", "jinja"])
def test_a_name_that_would_do_nothing_is_refused(template: Any) -> None:
    for nothing in (None, ""):
        assert template.encode_chat([{**USER[0], "name": nothing}]).tolist() == template.encode_chat(USER).tolist()
    with pytest.raises(InvalidArgument, match=r'^messages\[1\]\.name.*"jay"') as caught:
        template.encode_chat([*USER, {**USER[0], "name": "jay"}])
    assert caught.value.field == "messages"
    with pytest.raises(InvalidArgument, match=r"\[0\]\.name must be a string"):
        template.encode_chat([{**USER[0], "name": 3}])


def test_a_hidden_last_message_cannot_be_continued() -> None:
    template = JinjaChatTemplate("{{ messages[0].content }}", TOKENIZER)
    with pytest.raises(InvalidArgument, match="cannot be continued"):
        template.encode_chat(conversation(["a", "b"]), continue_final_message=True)


def test_a_search_for_markers_in_messages_counts() -> None:
    card = load_card(str(TEXT_GOLDEN / "qwen2-bytes"))
    assert isinstance(card.tokenizer, HfTokenizer)
    assert card.tokenizer.remembers
    template = JinjaChatTemplate(None, card.tokenizer)
    messages = conversation(["<|x" * 8000])
    template.encode_chat(messages)
    with pytest.raises(MuchNew):
        template.encode_chat(messages, new_chars=1000)
    refusing = JinjaChatTemplate("{{ raise_exception('rendered') }}", card.tokenizer)
    with pytest.raises(MuchNew):  # before anything is escaped and rendered
        refusing.encode_chat(conversation(["<|end|>" + "x" * 2000]), new_chars=1000)
    few = conversation(["<|x <|end|> short"])
    assert template.encode_chat(few, new_chars=1000).tolist() == template.encode_chat(few).tolist()
