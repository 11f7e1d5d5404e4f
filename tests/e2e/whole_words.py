"""Run by the Python of a vLLM: has a tiny model write whole words and nothing else, so that its text tells its tokens.

Standard input: the folder of the model, and the tokens that it may write besides, with how much it likes them.
Standard output, last line: how many words it has.
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

folder, liked = json.load(sys.stdin)
(weights,) = pathlib.Path(folder).glob("*.safetensors")
tokenizer = Tokenizer.from_file(str(pathlib.Path(folder) / "tokenizer.json"))
words = [
    number
    for token, number in tokenizer.get_vocab().items()
    if token.startswith("\u0120") and tokenizer.encode(" " + token[1:]).ids == [number]
]
held = load_file(weights)
head = held["lm_head.weight"]
written = torch.zeros_like(head)
written[words] = head[words]
for number, factor in liked.items():
    written[int(number)] = head[int(number)] * factor
save_file(held | {"lm_head.weight": written}, weights, metadata={"format": "pt"})
print(json.dumps(len(words)))
