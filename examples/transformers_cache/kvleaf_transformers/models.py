"""What a forward is called with: text models, encoder-decoders, models that see an image."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from kvleaf_transformers.arena import Arena
from kvleaf_transformers.batch import Batch
from kvleaf_transformers.cache import ArenaCache
from kvleaf_transformers.places import Places


@dataclass
class EncoderInput:
    """What a request's encoder reads: features, pixels. The digest stands for it."""

    digest: bytes
    tokens: int  # that the encoder's output has
    inputs: dict[str, torch.Tensor]  # of the model's forward, batch 1
    at: int = 0  # the text depends on it from this token on


class TextModel:
    """A decoder alone."""

    def __init__(self, model: PreTrainedModel, arena: Arena, places: Places):
        self.model = model
        self.cache = ArenaCache.of_text(arena, places, model.dtype)
        self.has_states = any(layer.state for layer in places.layers)
        self.goes_on_in_chunks = not self.has_states or _goes_on_in_chunks(model)
        self.encoder_runs = 0

    def forward(
        self, batch: Batch, ids: torch.Tensor, encoders: Sequence[EncoderInput | None]
    ) -> torch.Tensor:
        """Logits [rows, vocabulary] after the last of the new tokens, ids [rows, new_tokens]."""
        self.cache.bind(batch)
        output = self.model(
            input_ids=ids,
            position_ids=batch.position_ids(),
            attention_mask=batch.attention_mask(),
            past_key_values=self.cache,
            use_cache=True,
            **self._encoder_arguments(batch, encoders),
        )
        self.cache.store()
        return output.logits[:, -1]

    def _encoder_arguments(self, batch: Batch, encoders: Sequence[EncoderInput | None]) -> dict:
        if any(encoders):
            raise ValueError(f"{type(self.model).__name__} has no encoder that is known here")
        return {}


class ImageModel(TextModel):
    """Layers between the text's attend to an image, from its token on (mllama)."""

    def _encoder_arguments(self, batch: Batch, encoders: Sequence[EncoderInput | None]) -> dict:
        if batch.encoder_tokens == 0:
            return {}
        # [rows, new_tokens, images, tiles]: nothing before the image's token sees it.
        mask = torch.stack([e.inputs["aspect_ratio_mask"][0] for e in encoders])
        mask = mask[:, None].repeat(1, batch.new_tokens, 1, 1)
        mask[batch.position_ids() < torch.tensor([e.at for e in encoders])[:, None]] = 0
        arguments = {"cross_attention_mask": mask}
        if not batch.encoder_filled:
            self.encoder_runs += len(encoders)
            for name in encoders[0].inputs:
                arguments[name] = torch.cat([e.inputs[name] for e in encoders])
        return arguments


class EncoderDecoderModel(TextModel):
    """Every decoder layer keeps the text's and the encoder's keys and values (whisper)."""

    def __init__(self, model: PreTrainedModel, arena: Arena, places: Places):
        super().__init__(model, arena, places)
        self.cross = ArenaCache.of_encoder(arena, places, model.dtype)

    def forward(
        self, batch: Batch, ids: torch.Tensor, encoders: Sequence[EncoderInput | None]
    ) -> torch.Tensor:
        self.cache.bind(batch)
        self.cross.bind(batch)
        if batch.encoder_filled:
            # The decoder wants an encoder's output and reads none of it: its keys are there.
            shape = (len(encoders), batch.encoder_tokens, self.model.config.d_model)
            encoded = torch.zeros((), dtype=self.model.dtype).expand(shape)
        else:
            self.encoder_runs += len(encoders)
            inputs = {k: torch.cat([e.inputs[k] for e in encoders]) for k in encoders[0].inputs}
            encoded = self.model.get_encoder()(**inputs).last_hidden_state
        output = self.model(
            encoder_outputs=(encoded,),
            decoder_input_ids=ids,
            decoder_position_ids=batch.position_ids(),
            decoder_attention_mask=batch.attention_mask(),
            past_key_values=EncoderDecoderCache(self.cache, self.cross),
            use_cache=True,
        )
        self.cache.store()
        return output.logits[:, -1]


def _goes_on_in_chunks(model: PreTrainedModel) -> bool:
    """Whether the model's code, given a state, can compute several tokens at once. Some
    architectures' scan starts from nothing unless there is one token (jamba); told by a try
    over the model's own cache.
    """
    ids = torch.arange(1, 9)[None] % model.config.get_text_config(decoder=True).vocab_size
    positions = torch.arange(8)[None]
    with torch.no_grad():
        whole = model(input_ids=ids, position_ids=positions).logits[0, -1]
        cache = DynamicCache(config=model.config)
        for part in (slice(0, 4), slice(4, 8)):
            arguments = dict(input_ids=ids[:, part], position_ids=positions[:, part])
            chunked = model(**arguments, past_key_values=cache, use_cache=True).logits[0, -1]
    return torch.allclose(chunked, whole, rtol=1e-3, atol=1e-3 * float(whole.abs().max()))


def serve(model: PreTrainedModel, arena: Arena, places: Places) -> TextModel:
    if model.config.is_encoder_decoder:
        return EncoderDecoderModel(model, arena, places)
    if any(layer.cross for layer in places.layers):
        return ImageModel(model, arena, places)
    return TextModel(model, arena, places)
