"""A training script of transformers that does not mention disco_accel; launch.yaml, ddp.yaml and deepspeed.json run it.

python docs/examples/train.py
"""

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed

set_seed(0)
model = AutoModelForCausalLM.from_pretrained("out/tiny")
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
rows = [{"input_ids": [i + j for j in range(16)], "labels": [i + j for j in range(16)]} for i in range(16)]
arguments = TrainingArguments(
    "out/adapter", max_steps=2, per_device_train_batch_size=2, logging_steps=1, save_strategy="no", report_to=[]
)
trainer = Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator)
trainer.train()
if trainer.is_world_process_zero():
    model.save_pretrained("out/adapter")
trainer.accelerator.end_training()
