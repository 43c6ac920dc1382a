# Weft with CUDA 13: the GPU tests and benches, and an image that training programs run in.
#
#   docker build -f docker/gpu.Dockerfile -t weft-gpu .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 weft-gpu
#   docker run … --network host --device /dev/infiniband --cap-add IPC_LOCK weft-gpu            with RDMA
#   docker build -f docker/gpu.Dockerfile --target test --build-arg COMMIT="$(git describe --always --dirty)" -t weft-gpu-test .
#   docker run --rm --gpus all --ipc=host weft-gpu-test
#
# What containers with GPUs need, and why (docker/compose.yaml has it as the profiles gpu and gpu-rdma):
#   --ipc=host (or --shm-size=1g)   NCCL keeps its buffers in /dev/shm, of which a container gets 64 MiB (Weft's shm does not)
#   --ulimit memlock=-1             pages that a NIC or a GPU reads must stay where they are
#   --device /dev/infiniband        the RDMA devices; --cap-add IPC_LOCK lets a user who is not root lock the pages;
#                                   --network host: a RoCE port has its addresses in the network of its interface
#   CUDA IPC and Weft's shm between containers   need one PID namespace (--pid=host or --pid=container:…), CUDA IPC --ipc=host too
# The driver's libcuda comes from the host, by the NVIDIA container toolkit.
ARG BASE=nvidia/cuda:13.0.2-base-ubuntu24.04

FROM ${BASE} AS source
RUN --mount=type=secret,id=apt,target=/etc/apt/apt.conf.d/99build,required=false \
    apt-get -q update && apt-get -qy install --no-install-recommends python3 ca-certificates && rm -rf /var/lib/apt/lists/*
WORKDIR /weft
COPY dev ./
COPY tools/dev tools/dev
COPY cmake/requirements cmake/requirements
# nvcc and NCCL come from the wheels that match torch's, so the base need hold no more than a runtime.
RUN --mount=type=secret,id=apt,target=/etc/apt/apt.conf.d/99build,required=false \
    --mount=type=secret,id=pip,target=/etc/pip.conf,required=false \
    --mount=type=cache,target=/root/.cache/pip \
    ./dev setup --cuda pip
COPY . .

# Needs a GPU when it is run, not when it is built. Of the preset that keeps the ranges: a bench reads them off the timeline.
FROM source AS test
ARG JOBS=
RUN --mount=type=secret,id=pip,target=/etc/pip.conf,required=false \
    --mount=type=cache,target=/root/.cache/ccache \
    ./dev gpu --prepare --preset profile --cuda pip ${JOBS:+--jobs ${JOBS}}
# What the results are said to be of: the image has no .git.
ARG COMMIT=unknown
RUN echo "${COMMIT}" > COMMIT
CMD ["./dev", "gpu", "--preset", "profile", "--cuda", "pip"]

FROM source AS gather
ARG JOBS=
RUN --mount=type=cache,target=/root/.cache/ccache \
    ./dev pack --preset release --cuda pip ${JOBS:+--jobs ${JOBS}} --output /opt/weft digits weft-run weft-agent weft-info weft-debug weft-timeline

FROM ${BASE} AS runtime
# Opened at run time: RDMA's library and the drivers that it opens by name. Without a card they do nothing.
RUN --mount=type=secret,id=apt,target=/etc/apt/apt.conf.d/99build,required=false \
    apt-get -q update && apt-get -qy install --no-install-recommends libibverbs1 ibverbs-providers && rm -rf /var/lib/apt/lists/*
COPY --from=gather /opt/weft /opt/weft
COPY --from=gather /weft/examples/digits/data /weft/examples/digits/data
RUN useradd --create-home --uid 10001 weft
USER weft
WORKDIR /home/weft
ENV PATH=/opt/weft/bin:${PATH} LD_LIBRARY_PATH=/opt/weft/lib NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["weft-run", "--nproc-per-node", "gpu", "digits"]
