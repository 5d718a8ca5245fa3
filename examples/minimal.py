"""The smallest watched AMP loop. Afterwards: ampscope check logs"""

import torch
from torch.nn import functional as F

import ampscope

device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device)
ampscope.watch(scaler, model)  # the one new line

for _ in range(200):
    x = torch.randn(64, 16, device=device)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

print(f"last loss {loss.item():.4f}; recorded in {ampscope.handle(scaler).run_dir}")
