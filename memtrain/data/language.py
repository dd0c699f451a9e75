"""Rows of language models: which tokens they have, and which of them are learnt.

Causal: a text is learnt as a whole, with the end of sequence behind it; of a prompt and its completion the completion and the
end. The prompt and the completion are made tokens of apart, since a model that is asked sees the prompt alone. In front stands
what the tokenizer sets there by itself. A completion without a word is refused: it would teach to say nothing.
Masked: the text within the tokenizer's own special tokens; which of it is told is drawn later.
Sequence to sequence: the prompt as the tokenizer writes a source, the completion as it writes a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

from memtrain.data.chat import ChatEncoder
from memtrain.data.examples import Ends, Example, check_ids, cut_before_end, in_rows, room, targets, tokenise
from memtrain.data.forms import Completion, Conversation, Form, Instruction, Text, Tokens
from memtrain.data.layouts import Columns, Layout
from memtrain.data.options import DataOptions
from memtrain.data.records import RowRefused
from memtrain.data.rows import IGNORED
from memtrain.data.templates import ChatTemplate, Message

_ANSWERS: Final = {
    Layout.COMPLETION: "completions are learnt",
    Layout.MESSAGES: "assistant turns are learnt",
    Layout.SHAREGPT: "assistant turns are learnt",
    Layout.ALPACA: "outputs are learnt",
}


class _Conversations:
    """Whether and how a tokenizer writes conversations."""

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._encoder: ChatEncoder | None = None
        self.can_write = template is not None or bool(getattr(tokenizer, "chat_template", None))

    def encoder(self) -> ChatEncoder:
        """Made when it is first needed, since it is refused without a template."""
        if self._encoder is None:
            self._encoder = ChatEncoder(self._tokenizer, self._template)
        return self._encoder

    def prepared(self, form: Form) -> Form:
        if not isinstance(form, Instruction):
            return form
        return form.conversation() if self.can_write else form.completion()


class Causal:
    """Makes examples of a causal model: ``{"input_ids", "labels"}``."""

    def __init__(self, tokenizer: Any, options: DataOptions, length: int, vocab_size: int | None) -> None:
        self._tokenizer, self._options, self._length, self._vocab_size = tokenizer, options, length, vocab_size
        self._everything = options.train_on == "everything"
        self._before = Ends.of(tokenizer).before
        self._chats = _Conversations(tokenizer, options.chat_template)

    def accept(self, columns: Columns) -> None:
        layout = columns.layout
        if layout is Layout.TEXT and self._options.train_on == "completions":
            raise ValueError("train_on is completions, and rows of text have none: set train_on to everything, or to auto.")
        if layout in _ANSWERS and self._options.long_rows == "split":
            raise ValueError(
                f"long_rows is split, and rows with layout {layout} would lose the questions to their answers: set long_rows to "
                f"truncate or leave_out."
            )
        if layout in (Layout.MESSAGES, Layout.SHAREGPT):
            self._chats.encoder()
        elif layout is not Layout.TOKENS and self._tokenizer.eos_token_id is None and not self._chats.can_write:
            raise ValueError(
                "the tokenizer has no end-of-sequence token, and one must follow each text, so that the model learns to stop: set "
                "its eos_token."
            )

    def learnt(self, columns: Columns) -> str:
        if columns.layout is Layout.TOKENS:
            return "tokens are learnt as their labels and masks say, all of them where there are none"
        if self._everything or columns.layout is Layout.TEXT:
            return "every token is learnt"
        if columns.layout is Layout.ALPACA:
            way = "the chat template" if self._chats.can_write else "the Alpaca prompt"
            return f"written by {way}, {_ANSWERS[columns.layout]}"
        return _ANSWERS[columns.layout]

    def prepared(self, form: Form) -> Form:
        return self._chats.prepared(form)

    def texts(self, form: Form) -> tuple[str, ...]:
        match form:
            case Text(text):
                return (text,)
            case Completion(prompt, completion):
                return prompt, completion
        return ()

    def tokens(self, texts: Sequence[tuple[str, ...]]) -> list[list[list[int]]]:
        return in_rows(tokenise(self._tokenizer, list(chain.from_iterable(texts))), texts)

    def make(self, form: Form, tokens: Sequence[list[int]]) -> list[Example]:
        ids, labels = self._encoded(form, tokens)
        if len(ids) == 1:
            raise RowRefused("has 1 token, and there must be one to predict after it")
        length, long_rows = self._length, self._options.long_rows
        if len(ids) > length and long_rows == "leave_out":
            return []
        if len(ids) > length and long_rows == "split":
            if ids != labels:
                raise RowRefused(
                    f"has {len(ids)} tokens of which some are not learnt, and long_rows is split, which cuts text alone: set "
                    f"long_rows to truncate or leave_out"
                )
            pieces = [ids[start:stop] for start, stop in cuts(len(ids), length)]
            return [Example({"input_ids": piece, "labels": list(piece)}, len(piece) - 1) for piece in pieces]
        kept = labels[:length]
        learnt = targets(kept, shifted=True)
        if not learnt:
            raise RowRefused(_nothing_left(labels, length))
        within = len(ids) > length and kept[-1] != IGNORED and labels[length] != IGNORED
        return [Example({"input_ids": ids[:length], "labels": kept}, learnt, max(0, len(ids) - length), within)]

    def _encoded(self, form: Form, tokens: Sequence[list[int]]) -> tuple[list[int], list[int]]:
        """Tokens and their labels, however long."""
        match form:
            case Text():
                ids = self._begun(self._ended(tokens[0], "text"))
                return ids, list(ids)
            case Completion():
                prompt, completion = self._begun(tokens[0]), self._ended(tokens[1], "completion")
                ids = prompt + completion
                return ids, list(ids) if self._everything else [IGNORED] * len(prompt) + completion
            case Conversation():
                chat, everything = self._chats.encoder(), self._everything
                if form.prompt:
                    encoded = chat.encode_completion(form.prompt, form.messages, form.tools, everything=everything)
                else:
                    encoded = chat.encode(form.messages, form.tools, everything=everything)
                # What a template writes after the last answer teaches nothing.
                stop = max((place for place, counts in enumerate(encoded.learnt, start=1) if counts), default=0)
                pairs = zip(encoded.input_ids[:stop], encoded.learnt, strict=False)
                return encoded.input_ids[:stop], [token if counts else IGNORED for token, counts in pairs]
            case Tokens():
                check_ids(form.input_ids, self._vocab_size, "input_ids")
                return form.input_ids, token_labels(form, self._vocab_size)
        raise AssertionError(form)

    def _begun(self, tokens: list[int]) -> list[int]:
        """Tokens with what begins a text in front of them, once."""
        return tokens if tokens[: len(self._before)] == self._before else self._before + tokens

    def _ended(self, tokens: list[int], what: str) -> list[int]:
        """Tokens with the end of sequence behind them, once."""
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise ValueError(f"the tokenizer has no end-of-sequence token, and one must follow each {what}: set its eos_token.")
        own = tokens[len(self._before) :] if self._before and tokens[: len(self._before)] == self._before else tokens
        if not own or own == [eos]:
            raise RowRefused(f"has a {what} that gives no token but those of its ends, so only the end would be learnt")
        return tokens if tokens[-1] == eos else [*tokens, eos]


class Masked:
    """Makes examples of a masked model: ``{"input_ids", "labels"}``, the labels all tokens, since masking comes later."""

    def __init__(self, tokenizer: Any, options: DataOptions, length: int, vocab_size: int | None) -> None:
        self._tokenizer, self._options, self._length, self._vocab_size = tokenizer, options, length, vocab_size
        self._ends = Ends.of(tokenizer)
        self._room = room(length, self._ends)
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))

    def accept(self, columns: Columns) -> None:
        if columns.layout is Layout.TOKENS and self._options.long_rows == "split":
            raise ValueError(
                "long_rows is split, and rows of tokens have their special tokens already: set long_rows to truncate or leave_out."
            )

    def learnt(self, columns: Columns) -> str:
        return "tokens that are masked, drawn anew in each step, are learnt"

    def prepared(self, form: Form) -> Form:
        return form

    def texts(self, form: Form) -> tuple[str, ...]:
        return (form.text,) if isinstance(form, Text) else ()

    def tokens(self, texts: Sequence[tuple[str, ...]]) -> list[list[list[int]]]:
        return in_rows(tokenise(self._tokenizer, list(chain.from_iterable(texts))), texts)

    def make(self, form: Form, tokens: Sequence[list[int]]) -> list[Example]:
        if isinstance(form, Tokens):
            return self._given(form)
        ids = self._ends.bare(tokens[0])
        over, long_rows = max(0, len(ids) - self._room), self._options.long_rows
        if self._special.issuperset(ids):
            raise RowRefused("has no token that could be masked, only special ones")
        if over and long_rows == "leave_out":
            return []
        starts = range(0, len(ids), self._room) if long_rows == "split" else (0,)
        pieces = (self._ends.around(ids[start : start + self._room]) for start in starts)
        return [self._example({"input_ids": piece}, over if long_rows == "truncate" else 0) for piece in pieces]

    def _given(self, form: Tokens) -> list[Example]:
        check_ids(form.input_ids, self._vocab_size, "input_ids")
        if form.labels is not None and token_labels(form, self._vocab_size) != form.input_ids:
            raise RowRefused("has labels of its own, and tokens are masked anew in each step: leave them out")
        if len(form.input_ids) > self._length and self._options.long_rows == "leave_out":
            return []
        columns = {"input_ids": cut_before_end(form.input_ids, self._length, self._ends)}
        if form.token_type_ids is not None:
            columns["token_type_ids"] = form.token_type_ids[: self._length]
        return [self._example(columns, max(0, len(form.input_ids) - self._length))]

    def _example(self, columns: dict[str, list[int]], cut: int) -> Example:
        ids = columns["input_ids"]
        learnable = sum(token not in self._special for token in ids)
        if not learnable:
            raise RowRefused(f"has a piece of {len(ids)} tokens of which none could be masked, all of them special ones")
        return Example({**columns, "labels": list(ids)}, learnable, cut)


class Seq2Seq:
    """Makes examples of a model that reads one text and writes another: ``{"input_ids", "labels"}`` of either's length."""

    def __init__(self, tokenizer: Any, options: DataOptions, length: int, vocab_size: int | None) -> None:
        self._tokenizer, self._options, self._length, self._vocab_size = tokenizer, options, length, vocab_size
        self._source, self._target = Ends.of(tokenizer), Ends.of(tokenizer, target=True)
        self._room = room(length, self._source)
        self._chats = _Conversations(tokenizer, options.chat_template)

    def accept(self, columns: Columns) -> None:
        if self._options.long_rows == "split":
            raise ValueError(
                "long_rows is split, and a source and its target cannot be cut alike: set long_rows to truncate or leave_out."
            )

    def learnt(self, columns: Columns) -> str:
        if columns.layout is Layout.TOKENS:
            return "labels are learnt"
        if columns.layout in (Layout.MESSAGES, Layout.SHAREGPT):
            return "the last assistant turn is learnt"
        return _ANSWERS[columns.layout]

    def prepared(self, form: Form) -> Form:
        form = self._chats.prepared(form)
        if not isinstance(form, Conversation):
            return form
        *asked, answer = form.prompt + form.messages
        if answer["role"] != "assistant" or not isinstance(answer.get("content"), str) or not asked:
            raise RowRefused("does not end with a text of the assistant after something that was asked, so there is no target")
        if not answer["content"].strip():
            raise RowRefused("ends with a message of the assistant that is empty, so there is nothing to learn")
        return Completion(self._written(asked, form.tools), answer["content"])

    def _written(self, asked: list[Message], tools: Any) -> str:
        if self._chats.can_write:
            return ChatTemplate(self._tokenizer, self._chats.encoder().chat_template).render(asked, tools, prompt=True)
        if len(asked) > 1 or tools or not isinstance(asked[0].get("content"), str) or not asked[0]["content"]:
            raise RowRefused("is a conversation of more than one question and its answer, which needs a chat_template")
        return str(asked[0]["content"])

    def texts(self, form: Form) -> tuple[str, ...]:
        return (form.prompt, form.completion) if isinstance(form, Completion) else ()

    def tokens(self, texts: Sequence[tuple[str, ...]]) -> list[list[list[int]]]:
        sources = iter(tokenise(self._tokenizer, [row[0] for row in texts if row]))
        written = iter(tokenise(self._tokenizer, [row[1] for row in texts if row], target=True))
        return [[next(sources), next(written)] if row else [] for row in texts]

    def make(self, form: Form, tokens: Sequence[list[int]]) -> list[Example]:
        if isinstance(form, Tokens):
            if not isinstance(form.labels, list) or set(form.labels) <= {IGNORED}:
                raise RowRefused("has no list of labels, and the tokens that are to be written are needed")
            last = max(place for place, label in enumerate(form.labels) if label != IGNORED)
            source, labels = form.input_ids, form.labels[: last + 1]
            check_ids(source, self._vocab_size, "input_ids")
            check_ids(labels, self._vocab_size, "labels", labels=True)
            kept = cut_before_end(source, self._length, self._source)
        else:
            own = self._source.bare(tokens[0])
            if not own:
                raise RowRefused("has a prompt that gives no token but those of its ends")
            source, kept = self._source.around(own), self._source.around(own[: self._room])
            labels = self._written_labels(self._target.bare(tokens[1]))
        over = max(0, len(source) - self._length) + max(0, len(labels) - self._length)
        if over and self._options.long_rows == "leave_out":
            return []
        without_end = len(labels) > self._length and labels[self._length] != IGNORED
        learnt = targets(labels[: self._length], shifted=False)
        if not learnt:
            raise RowRefused(f"has no label that is learnt within {self._length} tokens")
        return [Example({"input_ids": kept, "labels": labels[: self._length]}, learnt, over, without_end)]

    def _written_labels(self, tokens: list[int]) -> list[int]:
        """Tokens as a target, with the end of sequence once."""
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise ValueError("the tokenizer has no end-of-sequence token, and one must follow each target: set its eos_token.")
        if not tokens or tokens == [eos]:
            raise RowRefused("has a completion that gives no token but those of its ends, so only the end would be learnt")
        labels = self._target.around(tokens)
        return labels if eos in (*self._target.behind, labels[-1]) else [*labels, eos]


def cuts(count: int, length: int) -> list[tuple[int, int]]:
    """Where a text of ``count`` tokens is cut into pieces of ``length``, 2 or more, the first and the last of each.

    A last piece of one token would have no target, so it takes one from the piece before; where that has only two, both have
    the token that stands between them.

    >>> cuts(20, 8), cuts(17, 8), cuts(3, 2)
    ([(0, 8), (8, 16), (16, 20)], [(0, 8), (8, 15), (15, 17)], [(0, 2), (1, 3)])
    """
    pieces = [(start, min(start + length, count)) for start in range(0, count, length)]
    if len(pieces) > 1 and count % length == 1:
        (start, stop), _ = pieces[-2:]
        pieces[-2:] = [(start, stop - 1 if length > 2 else stop), (stop - 1, count)]
    return pieces


def token_labels(form: Tokens, vocab_size: int | None) -> list[int]:
    """A label for each token: those that are given, else the token itself, and none where a mask says so."""
    labels = list(form.input_ids)
    if form.labels is not None:
        count, own = form.padded
        if not isinstance(form.labels, list) or len(form.labels) != count:
            has = f"{len(form.labels)} labels" if isinstance(form.labels, list) else f"{form.labels!r} for its labels"
            raise RowRefused(f"has {has} and {count} tokens, and each token needs one")
        labels = form.labels[own]
        check_ids(labels, vocab_size, "labels", labels=True)
    for mask in form.masks:
        labels = [label if counts else IGNORED for label, counts in zip(labels, mask, strict=True)]
    return labels


def _nothing_left(labels: Sequence[int], length: int) -> str:
    learnt = [place for place, label in enumerate(labels) if label != IGNORED and place]
    if not learnt:
        return f"has {len(labels)} tokens of which none is learnt"
    return f"has nothing that is learnt left within {length} tokens (the prompt has {learnt[0]})"
