"""Read a prompt under a memory budget, then go on with generate().

python docs/examples/prefill.py
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from disco_accel import DiscoConfig, prefill, restore

model = AutoModelForCausalLM.from_pretrained("out/tiny").eval()
tokenizer = AutoTokenizer.from_pretrained("out/tiny")
prompt = tokenizer(["It is a truth", "The rest was silence"], return_tensors="pt", padding=True, padding_side="left")

config = DiscoConfig(memory_budget="512KiB")
output = prefill(model, prompt["input_ids"], prompt["attention_mask"], config=config)
token = output.logits[:, -1].argmax(-1, keepdim=True)
print("first tokens:", token.flatten().tolist())

# The cache is transformers' own; generate() decodes from it.
mask = torch.cat([prompt["attention_mask"], torch.ones_like(token)], dim=1)
tokens = torch.cat([prompt["input_ids"], token], dim=1)
more = model.generate(tokens, attention_mask=mask, past_key_values=output.past_key_values, max_new_tokens=4)
restore(model)

alone = model.generate(**prompt, max_new_tokens=5, do_sample=False)
assert torch.equal(more, alone), "the tokens are those of generate() alone"
print(tokenizer.batch_decode(more))
