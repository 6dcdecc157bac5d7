# The same for NixOS. Import it in your configuration, with vllm-timings-patch.py beside it:
#
#   vllm-timings patch export --format python --output vllm-timings-patch.py
{ ... }:
{
  virtualisation.oci-containers.containers.vllm = {
    image = "vllm/vllm-openai:v0.19.1";
    entrypoint = "/bin/sh";
    cmd = [
      "-c"
      ''python3 /vllm-timings-patch.py && exec vllm serve "$@"''
      "vllm"
      "Qwen/Qwen3-8B"
      "--served-model-name"
      "qwen3-8b"
    ];
    volumes = [
      "${./vllm-timings-patch.py}:/vllm-timings-patch.py:ro"
      "huggingface:/root/.cache/huggingface"
    ];
    ports = [ "127.0.0.1:8000:8000" ];
    extraOptions = [
      "--device=nvidia.com/gpu=all"
      "--ipc=host"
    ];
  };
}
