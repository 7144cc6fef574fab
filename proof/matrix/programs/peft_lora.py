"""Adapters of low rank on a frozen model, in a loop of one's own: built as PEFT's sequence classification example.

get_peft_model wraps the model, only the adapters and the head are trained, a schedule is stepped every batch, the loop and the evaluation
are the script's with tqdm around the loaders, and the adapter is saved as a folder after each epoch.
"""

import torch
from peft import LoraConfig, get_peft_model
from torch.optim import AdamW
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup, set_seed

set_seed(9)
batch_size, num_epochs, lr = 16, 4, 3e-3
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=60,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
    )
)


def make(count):
    ids = torch.randint(5, 60, (count, 20))
    label = (ids[:, :10].sum(1) > ids[:, 10:].sum(1)).long()
    lengths = torch.randint(12, 21, (count,))
    return [
        {"input_ids": row[:n], "labels": y} for row, n, y in zip(ids, lengths.tolist(), label, strict=True)
    ]


def collate_fn(examples):
    ids = torch.nn.utils.rnn.pad_sequence([e["input_ids"] for e in examples], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.stack([e["labels"] for e in examples]),
    }


train_dataloader = DataLoader(make(800), shuffle=True, collate_fn=collate_fn, batch_size=batch_size)
eval_dataloader = DataLoader(make(160), shuffle=False, collate_fn=collate_fn, batch_size=80)
peft_config = LoraConfig(
    task_type="SEQ_CLS",
    inference_mode=False,
    r=8,
    lora_alpha=16,
    lora_dropout=0.1,
    target_modules=["query", "value"],
)
model = get_peft_model(model, peft_config)
optimizer = AdamW(params=model.parameters(), lr=lr)
total = len(train_dataloader) * num_epochs
lr_scheduler = get_linear_schedule_with_warmup(
    optimizer=optimizer, num_warmup_steps=0.06 * total, num_training_steps=total
)

for epoch in range(num_epochs):
    model.train()
    for step, batch in enumerate(tqdm(train_dataloader, disable=None)):
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.6f}")
    model.eval()
    right = 0
    for _step, batch in enumerate(tqdm(eval_dataloader, disable=None)):
        with torch.no_grad():
            outputs = model(**batch)
        right += (outputs.logits.argmax(dim=-1) == batch["labels"]).sum().item()
    print(f"epoch {epoch}: {right} of {len(eval_dataloader.dataset)}")
    model.save_pretrained("adapter")

state = {
    "model": model.state_dict(),
    "optimizer": optimizer.state_dict(),
    "schedule": lr_scheduler.state_dict(),
}
torch.save(state | {"random": torch.get_rng_state()}, "model.pt")
