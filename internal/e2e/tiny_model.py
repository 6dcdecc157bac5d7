"""Makes a tiny Llama with random weights, so that a real vLLM can be run without downloading a model.

Usage: python tiny_model.py FOLDER

The text that it generates is noise, much of it empty or half a character: good test data for a proxy. Weights and
tokenizer are the same on every run, so with temperature 0 the answers are too.
"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512
CONTEXT = 4096

# Roles in the template are words, so that prompts of different roles differ; one special token ends a turn.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog while the old clock on the wall counts seconds, minutes and hours.",
    "A server answers requests: it reads the prompt, computes what it has not seen before, and writes one token after another.",
    "Numbers matter: 0 1 2 3 4 5 6 7 8 9 10 20 50 100 1000; so do signs like !, ?, (parentheses), [brackets] and {braces}.",
    "system user assistant tool function message content role name arguments",
    "Wer misst, misst Mist; wer genau misst, weiss mehr. Où est la bibliothèque? ¿Dónde está la estación?",
    "def prefill(tokens): return sum(len(t) for t in tokens) # time per token in milliseconds",
]


def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe.train_from_iterator(
        CORPUS * 4,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
    )


def main(folder: str) -> None:
    torch.manual_seed(0)
    tok = tokenizer()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=tok.bos_token_id,
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.pad_token_id,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tok.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
