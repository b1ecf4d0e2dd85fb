# The quickstart of the README in a container. Without a GPU:
#     docker build -t jaxlm . && docker run -v jaxlm-runs:/home/jaxlm/runs jaxlm
# With NVIDIA GPUs (the host needs their driver and the NVIDIA container toolkit; cuda12 or cuda13, as the driver allows):
#     docker build -t jaxlm-gpu --build-arg EXTRA=cuda12 . && docker run --gpus all -v jaxlm-runs:/home/jaxlm/runs jaxlm-gpu
# Another command stands behind the image's name: docker run -v jaxlm-runs:/home/jaxlm/runs jaxlm jaxlm sample runs/quickstart
ARG PYTHON=3.11
FROM python:${PYTHON}-slim

# Extras of pyproject.toml, with commas between them; none = for CPUs.
ARG EXTRA=""

WORKDIR /usr/src/jaxlm
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY jaxlm jaxlm
RUN pip install --no-cache-dir ".${EXTRA:+[$EXTRA]}"

# Not root: what the run writes on a mounted folder should not be root's. A folder of the host, rather than a volume, must
# be writable by this user (1000), or give --user.
RUN useradd --create-home --uid 1000 jaxlm && install -d -o jaxlm -g jaxlm /home/jaxlm/runs
USER jaxlm
WORKDIR /home/jaxlm
VOLUME /home/jaxlm/runs

CMD ["jaxlm", "train", "quickstart"]
