"""A callback in your Trainer, without a launcher.

python docs/examples/callback.py
"""

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

from disco_accel import DiscoCallback, DiscoConfig, stats

model = AutoModelForCausalLM.from_pretrained("out/tiny")
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
rows = [{"input_ids": [i + j for j in range(16)], "labels": [i + j for j in range(16)]} for i in range(16)]
arguments = TrainingArguments("out/adapter", max_steps=2, per_device_train_batch_size=2, save_strategy="no")
trainer = Trainer(
    model,
    arguments,
    train_dataset=rows,
    data_collator=default_data_collator,
    callbacks=[DiscoCallback(DiscoConfig(memory_budget="512KiB"))],
)
trainer.train()
print("steps from a plan:", stats(model)["steps_compiled"])
