import os,torch,torch.distributed as dist,torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
def run(r):
    dist.init_process_group("gloo",rank=r,world_size=2,init_method="file:///tmp/rv/g")
    torch.set_num_threads(1)
    # buffers under no_grad / eval / nosync timing
    class N(torch.nn.Module):
        def __init__(s):
            super().__init__(); s.w=torch.nn.Parameter(torch.ones(1)); s.register_buffer("b",torch.zeros(1))
        def forward(s,x): return s.w*x+s.b.clone()
    def fresh(v):
        n.b.fill_(v+r); 
    n=N(); d=DDP(n)
    fresh(10); n.eval(); d(torch.ones(1)); print(r,"eval grad",n.b.item(),flush=True)
    n.train(); fresh(20)
    with torch.no_grad(): d(torch.ones(1))
    print(r,"train no_grad",n.b.item(),flush=True)
    fresh(30)
    with d.no_sync(): d(torch.ones(1)).sum().backward()
    print(r,"first no_sync fwd",n.b.item(),flush=True)
    fresh(40)
    with d.no_sync(): d(torch.ones(1)).sum().backward()
    print(r,"2nd no_sync fwd",n.b.item(),flush=True)
    fresh(50); d(torch.ones(1)).sum().backward(); print(r,"sync after no_sync",n.b.item(), "grad", n.w.grad.item(),flush=True)
    # hidden outputs + retain_graph twice
    dist.barrier()
    # retain graph twice
    n2=torch.nn.Linear(2,1,bias=False); d2=DDP(n2); y=d2(torch.full((1,2),r+1.)).sum(); y.backward(retain_graph=True); g1=n2.weight.grad.clone(); y.backward(); print(r,"retain",g1[0,0].item(),n2.weight.grad[0,0].item(),flush=True)
    # nothing needs grad
    try: DDP(torch.nn.Flatten())
    except Exception as e: print(r,type(e).__name__,str(e)[:80],flush=True)
    dist.barrier(); dist.destroy_process_group()
if __name__=="__main__":
    try: os.remove("/tmp/rv/g")
    except OSError: pass
    mp.spawn(run,nprocs=2)
