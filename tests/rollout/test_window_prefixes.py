"""Slots share prefixes only with slots whose layers with a sliding window still hold the window at the end of the prefix."""

from types import SimpleNamespace

import numpy as np
import pytest

from rrl.models.decoder import MAX_DECODE_TOKENS
from rrl.rollout.exchange import HEADER_LENGTH, ExchangeSizes, PrefillChunk
from rrl.rollout.prefill_queue import PrefillQueue
from rrl.rollout.prefill_request import PrefillRequest
from rrl.rollout.prefixes import PrefixIndex

BLOCK, WINDOW, CHUNK = 4, 6, 8
HELD = 16
"""Positions that a layer holds: the window and the most tokens of a step or chunk."""
PROMPT = np.arange(10, dtype=np.int32)


def index_with_prompt(length=10):
    """An index whose slot 0 holds a prompt."""
    index = PrefixIndex(3, 4, window=WINDOW, window_slots=HELD)
    index.assign(0, np.arange(length, dtype=np.int32), length)
    return index


def test_a_slot_is_a_source_until_it_has_overwritten_the_window_at_the_end_of_the_prefix():
    index = index_with_prompt()
    # Position 5 of the prompt is lost once position 21 is written. A step writes up to 7 positions beyond its own.
    for decoded, expected in ((4, (0, 10, True)), (5, (1, 0, True))):
        index.record_lengths(np.array([decoded, 0, 0]))
        assert index.find_source(1, PROMPT) == expected
    index.record_lengths(np.zeros(3, int))
    index.append_decoded(0, np.arange(4))
    assert index.find_source(1, PROMPT) == (0, 10, True)
    index.append_decoded(0, np.arange(1))
    assert index.find_source(1, PROMPT) == (1, 0, True)


def test_a_copy_has_lost_what_its_source_had_lost():
    index = index_with_prompt()
    index.append_decoded(0, np.arange(4))
    index.assign(1, PROMPT, 10, [0])
    assert index.find_source(2, PROMPT[:9]) == (2, 0, True)  # position 4 is lost in both
    index.assign(1, PROMPT, 10)  # prefilled from its first token on
    assert index.find_source(2, PROMPT[:9]) == (1, 9, True)


def test_a_short_prefix_is_shared_until_its_first_position_is_overwritten():
    index = index_with_prompt(4)
    for decoded, expected in ((5, (0, 4, True)), (6, (1, 0, True))):
        index.record_lengths(np.array([decoded, 0, 0]))
        assert index.find_source(1, np.arange(5, dtype=np.int32)) == expected


class Device:
    """Caches of one layer with a window, and of one that holds all positions, as the device updates them."""

    def __init__(self, slots, context):
        self.rings = {size: [[None] * size for _ in range(slots)] for size in (HELD, context)}
        self.copies = 0

    def run(self, chunks, texts):
        headers = [PrefillChunk(*map(int, chunk[:HEADER_LENGTH])) for chunk in chunks]
        self.copy([header for header in headers if header.copied > 0])
        for header in headers:
            if header.length:
                self.check(header.slot, texts[header.slot][: header.start])
                self.write(header.slot, header.start, texts[header.slot][: header.start + header.length])
        self.copy([header._replace(copied=-header.copied) for header in headers if header.copied < 0])
        for header in headers:
            if header.begins_turn:
                end = header.start + header.length
                assert end == len(texts[header.slot])
                self.check(header.slot, texts[header.slot])

    def copy(self, headers):
        """As `KVCache.copy_rows`: whole blocks, all rows of a block read before any is written."""
        for size, rows in self.rings.items():
            for index in range(size // BLOCK):
                block, new = slice(index * BLOCK, (index + 1) * BLOCK), []
                for header in headers:
                    last = (header.copied - 1) // BLOCK
                    if last - (last - index) % (size // BLOCK) >= header.held // BLOCK:
                        new.append((header.slot, rows[header.source][block]))
                for slot, values in new:
                    rows[slot][block] = values
        self.copies += len(headers)

    def write(self, slot, start, text, rejected=()):
        """Write the positions from `start` on; a value is the text up to its position."""
        for rows in self.rings.values():
            for position in range(start, len(text) + len(rejected)):
                value = tuple(text[: position + 1]) if position < len(text) else None
                rows[slot][position % len(rows[slot])] = value

    def check(self, slot, text):
        """The windows at the end of the text are complete."""
        for size, rows in self.rings.items():
            for position in range(max(len(text) - WINDOW + 1, 0) if size == HELD else 0, len(text)):
                assert rows[slot][position % size] == tuple(text[: position + 1]), (slot, position)


def simulate(seed, window, exchanges=60, slots=4, context=80):
    """Run random episodes of few different texts. Returns the number of copies and of prefilled tokens."""
    rng = np.random.default_rng(seed)
    sizes = ExchangeSizes(slots, context, slots, CHUNK, 0, window=window, window_slots=HELD)
    queue, device = PrefillQueue(sizes, share_prompts=True), Device(slots, context)
    texts, written = [[] for _ in range(slots)], [0] * slots  # written: tokens of the present turn
    request = SimpleNamespace(seed=0, temperature=1.0)

    def submit(slot, tokens, start):
        texts[slot] = texts[slot][:start] + tokens
        queue.add(
            PrefillRequest(
                slot, np.array([*tokens, 0], np.int32), start, request, offset=0, turn_limit=9, stop_state=0
            )
        )

    for _ in range(exchanges):
        decoding = [slot not in queue and bool(texts[slot]) for slot in range(slots)]
        for slot in np.flatnonzero(decoding):
            count = int(rng.integers(0, MAX_DECODE_TOKENS))
            device.check(slot, texts[slot])
            new = [~int(token) for token in rng.integers(0, 2, count)] if rng.random() < 0.3 else [~1] * count
            texts[slot] = texts[slot] + new
            device.write(slot, len(texts[slot]) - count, texts[slot], [None] * (MAX_DECODE_TOKENS - 1))
            written[slot] += count
        ends = [decoding[slot] and (rng.random() < 0.4 or len(texts[slot]) > 50) for slot in range(slots)]
        queue.record_lengths(np.array([0 if ends[slot] else written[slot] for slot in range(slots)]))
        for slot in range(slots):
            if ends[slot] and slot not in queue:
                turn = texts[slot][len(texts[slot]) - written[slot] :]
                queue.record_decoded(slot, ~np.array(turn, np.int32))
                written[slot] = 0
            if slot not in queue and (ends[slot] or not texts[slot]):
                if len(texts[slot]) < 50 and texts[slot] and rng.random() < 0.5:
                    submit(slot, [2] * int(rng.integers(1, 20)), len(texts[slot]))
                else:
                    submit(slot, [3, 4, 3, 4] * 3 + [5] * int(rng.integers(0, 12)), 0)
        device.run(queue.take_chunks(), texts)
    return device.copies, queue.prefilled_tokens


@pytest.mark.parametrize("seed", range(8))
def test_a_turn_never_begins_without_its_window(seed):
    copies, _ = simulate(seed, WINDOW)
    assert copies > 3


def test_sharing_without_regard_to_the_window_would_lose_it():
    with pytest.raises(AssertionError):
        simulate(0, 0)
