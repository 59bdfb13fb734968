"""The whole cache of one model, in slots: kv_cache.cpp in Python, with NumPy for the model.

Chats share what they have in common and are batched as they come. The model is small and its
weights are random, but it is one: attention to all tokens, attention to a window, and a recurrent
state, each read and written through the tensors that the cache hands out. Every answer must be the
one that the same model gives one chat at a time in a slotted cache, where nothing is shared.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import kvleaf
import numpy as np

WIDTH, HEADS, VOCABULARY = 16, 2, 101
DIM = WIDTH // HEADS
WINDOW = 32
LAYERS = ["full", "window", "state"]
CHUNK = 48  # most tokens of one chat in one step
ANSWER = 12

random = np.random.default_rng(7)
WEIGHTS = random.normal(size=(len(LAYERS), 4, WIDTH, WIDTH)) / WIDTH**0.5
EMBEDDING = random.normal(size=(VOCABULARY, WIDTH)) / WIDTH**0.5


class Model:
    """A forward through the tensors of a cache: views that never change, so taken once."""

    def __init__(self, cache: kvleaf.KVCache):
        attention = [i for i, kind in enumerate(LAYERS) if kind != "state"]
        self.keys = {i: cache.keys(i).numpy() for i in attention}
        self.values = {i: cache.values(i).numpy() for i in attention}
        self.state = cache.recurrent_state(LAYERS.index("state")).numpy()

    def forward(self, step: kvleaf.StepIndices, tokens: list[int]) -> list[int]:
        """`tokens` are the new ones of all rows. What each row says next."""
        said = []
        begins = step.cu_seqlens_q.numpy()
        for row, past in enumerate(step.past_lens.numpy()):
            hidden = np.zeros(WIDTH)
            for i in range(begins[row], begins[row + 1]):
                hidden = EMBEDDING[tokens[i]]
                for layer, kind in enumerate(LAYERS):
                    if kind == "state":
                        out = self.recur(layer, step.slot_ids[row], hidden)
                    else:
                        position = int(past) + i - int(begins[row])
                        out = self.attend(layer, step, row, position, hidden)
                    hidden = np.tanh(hidden + WEIGHTS[layer, 3] @ out)
            said.append(int(np.argmax(EMBEDDING @ hidden)))
        return said

    def attend(
        self, layer: int, step: kvleaf.StepIndices, row: int, position: int, hidden: np.ndarray
    ) -> np.ndarray:
        query, key, value = (WEIGHTS[layer, which] @ hidden for which in range(3))
        keys, values = self.keys[layer], self.values[layer]
        first = max(0, position - WINDOW + 1) if LAYERS[layer] == "window" else 0
        seen = np.arange(first, position + 1)
        # Where the entries of these positions lie: paged, [pages + 1, page, heads, dim], by the
        # table; slotted, [slots, max_len, heads, dim], in the slot.
        table = step.block_table(layer)
        if table is None:
            at = np.full(len(seen), step.slot_ids[row]), seen
        else:
            page = keys.shape[1]
            at = table[row][seen // page], seen % page
        keys[at[0][-1], at[1][-1]] = key.reshape(HEADS, DIM)
        values[at[0][-1], at[1][-1]] = value.reshape(HEADS, DIM)
        scores = np.einsum("hd,nhd->hn", query.reshape(HEADS, DIM), keys[at])
        shares = np.exp(scores / DIM**0.5)
        shares /= shares.sum(axis=1, keepdims=True)
        return np.einsum("hn,nhd->hd", shares, values[at]).reshape(WIDTH)

    def recur(self, layer: int, slot: int, hidden: np.ndarray) -> np.ndarray:
        """The slot's state [heads, dim, dim] forgets a little and takes in k · vᵀ."""
        query, key, value = (
            (WEIGHTS[layer, which] @ hidden).reshape(HEADS, DIM) for which in range(3)
        )
        self.state[slot] = 0.95 * self.state[slot] + key[:, :, None] * value[:, None, :]
        return np.einsum("hk,hkv->hv", query, self.state[slot]).reshape(WIDTH)


def make(mode: str, slots: int) -> kvleaf.KVCache:
    config = kvleaf.KVCacheConfig(len(LAYERS), slots, 512, mode=mode, dtype="float32")
    return kvleaf.KVCache.make(
        config,
        [
            kvleaf.KVLayerSpec.attention(HEADS, DIM),
            kvleaf.KVLayerSpec.attention(HEADS, DIM, window=WINDOW),
            kvleaf.KVLayerSpec.state(heads=HEADS, k_dim=DIM, v_dim=DIM),
        ],
    )


@dataclass
class Chat:
    number: int
    ids: list[int]  # prompt, and then what was said
    end: int  # prompt and answer
    done: int = 0  # tokens that are computed


def serve(cache: kvleaf.KVCache, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Serves all prompts, as many at a time as there are slots. Prompts and answers, and how many
    prompt tokens were not computed."""
    paged = cache.mode() == kvleaf.KVCacheMode.paged
    model = Model(cache)
    answers: list[list[int]] = [[] for _ in prompts]
    waiting = list(enumerate(prompts))
    running: dict[int, Chat] = {}
    reused = 0
    while waiting or running:
        for slot in range(cache.config.max_seqs):
            if slot in running or not waiting:
                continue
            number, prompt = waiting.pop(0)
            chat = running[slot] = Chat(number, list(prompt), len(prompt) + ANSWER)
            if paged:
                chat.done = cache.admit(slot, np.array(prompt, np.int32))
                reused += chat.done
        # The rest of the prompt up to where a state is to be kept, a chunk of it at most; or the
        # one token that was said last.
        tokens: list[int] = []
        begins, past = [0], []
        for slot, chat in running.items():
            stop = min(len(chat.ids), chat.done + CHUNK, cache.next_stop(slot) or len(chat.ids))
            tokens += chat.ids[chat.done : stop]
            past.append(chat.done)
            begins.append(len(tokens))
            chat.done = stop
        slots = list(running)
        said = model.forward(cache.prepare_step(begins, past, slots), tokens)
        for slot, token in zip(slots, said):
            chat = running[slot]
            if chat.done < len(chat.ids):  # in the middle of its prompt
                continue
            chat.ids.append(token)
            if len(chat.ids) == chat.end:
                answers[chat.number] = chat.ids
                if paged:
                    cache.retire(slot, np.array(chat.ids, np.int32))  # findable for the next turn
                else:
                    cache.evict_batch(slot)
                del running[slot]
    return answers, reused


def main() -> int:
    shared, alone = make("paged", 4), make("slotted", 1)
    prompts = [  # one system prompt, and a question each
        [i if i < 70 else (i * 7 + chat * 13) % VOCABULARY for i in range(90 + 5 * chat)]
        for chat in range(6)
    ]
    for turn in range(1, 4):
        answers, reused = serve(shared, prompts)
        if answers != serve(alone, prompts)[0]:
            print(f"turn {turn}: the answers differ")
            return 1
        total = sum(map(len, prompts))
        print(f"turn {turn}: {reused} of {total} prompt tokens reused, answers as without a cache")
        prompts = [ids + [(i * 5 + turn) % 50 for i in range(20)] for ids in answers]
    return 0


if __name__ == "__main__":
    sys.exit(main())
