package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/vllm-timings/vllm-timings/internal/e2e/stack"
)

const llamaSwap = "llama-swap"

// peers are the contenders of --peers. LiteLLM takes long, so that it is only there when asked for.
func peers(self, binary string, withLiteLLM bool) ([]contender, error) {
	nginx, err := exec.LookPath("nginx")
	if err != nil {
		if nginx, err = exec.LookPath("/usr/sbin/nginx"); err != nil { // not in everybody's PATH
			return nil, fmt.Errorf("needs nginx (Debian: nginx): %w", err)
		}
	}
	swap, err := stack.FindLlamaSwap()
	if err != nil {
		return nil, err
	}
	ours := func(name string, bare bool, flags ...string) contender {
		// Without metrics in the answers, one that comes at once may have no timings.
		return contender{name: name, mallocs: "/-/metrics", beside: plain, bare: bare, timings: !bare, chain: []program{serve(binary, flags...)}}
	}
	list := []contender{
		{name: direct},
		{name: "nginx", foreign: true, chain: []program{nginxProgram(nginx)}},
		{name: plain, mallocs: mallocsPath, foreign: true, chain: []program{fixed(self, "plain", listenArg, upstreamArg)}},
		{name: llamaSwap, foreign: true, chain: []program{llamaSwapProgram(swap)}},
		{name: "llama-swap + sidecar", beside: llamaSwap, foreign: true, timings: true, chain: []program{llamaSwapProgram(swap), serve(binary)}},
		// What a user gets from a vLLM with its flags, and from one without. Only observed has to be asked for.
		ours(sidecar, false),
		ours("sidecar, window", true),
		ours("sidecar, observed", true, "--sources", "observed"),
	}
	if path := os.Getenv("LITELLM"); withLiteLLM && path != "" {
		list = append(list, contender{name: "LiteLLM", foreign: true, slow: true, chain: []program{liteLLMProgram(path)}})
	}
	return list, nil
}

// written is a program that reads a configuration, which may name its folder.
func written(name string, config func(listen, upstream, dir string) string, args func(file, listen, dir string) []string) program {
	return program{command: func(listen, upstream, dir string) ([]string, error) {
		file := filepath.Join(dir, name)
		return args(file, listen, dir), os.WriteFile(file, []byte(config(listen, upstream, dir)), 0o600)
	}}
}

// nginxProgram is nginx as one sets it up before a server that streams. Its log of requests is on, as the sidecar's is.
func nginxProgram(path string) program {
	return written("nginx.conf", func(listen, upstream, dir string) string {
		return fmt.Sprintf(`daemon off;
worker_processes auto;
worker_rlimit_nofile 16384;
pid %[3]s/pid;
events { worker_connections 8192; }
http {
	access_log %[3]s/access.log;
	client_body_temp_path %[3]s/body;
	proxy_temp_path %[3]s/proxy;
	fastcgi_temp_path %[3]s/fastcgi;
	uwsgi_temp_path %[3]s/uwsgi;
	scgi_temp_path %[3]s/scgi;
	keepalive_requests 1000000;
	upstream vllm {
		server %[2]s;
		keepalive 1024;
		keepalive_requests 1000000;
	}
	server {
		listen %[1]s backlog=4096;
		location / {
			proxy_pass http://vllm;
			proxy_http_version 1.1;
			proxy_set_header Connection "";
			proxy_buffering off;
		}
	}
}
`, listen, upstream, dir)
	}, func(file, _, dir string) []string {
		return []string{path, "-e", "stderr", "-p", dir, "-c", file}
	})
}

// llamaSwapProgram is llama-swap with the upstream as a server that always runs.
func llamaSwapProgram(path string) program {
	p := written("llama-swap.yaml", func(_, upstream, _ string) string {
		return fmt.Sprintf("peers:\n  vllm:\n    proxy: http://%s\n    models:\n      - %s\n", upstream, model)
	}, func(file, listen, _ string) []string {
		return []string{path, "-config", file, "-listen", listen}
	})
	p.ready = "/health"
	return p
}

// liteLLMProgram is LiteLLM with the one worker that it has if not told otherwise, without a database, and without anything
// that it asks others for. With more workers uvicorn ends those that do not answer within 5 s, and on a busy machine
// importing takes longer.
func liteLLMProgram(path string) program {
	p := written("litellm.yaml", func(_, upstream, _ string) string {
		return fmt.Sprintf(`model_list:
  - model_name: %[1]s
    litellm_params:
      model: hosted_vllm/%[1]s
      api_base: http://%[2]s/v1
      api_key: none
litellm_settings:
  num_retries: 0
  request_timeout: 600
general_settings:
  forward_client_headers_to_llm_api: true
  dangerously_permit_weak_or_unset_master_key: true # on the loopback, and nobody else here asks for keys
`, model, upstream)
	}, func(file, listen, _ string) []string {
		host, port, _ := net.SplitHostPort(listen)
		return []string{path, "--config", file, "--host", host, "--port", port, "--num_workers", "1", "--telemetry", "False"}
	})
	p.env = []string{
		"LITELLM_LOCAL_MODEL_COST_MAP=True", // instead of a download
		"LITELLM_MODE=PRODUCTION",
		"LITELLM_LOG=ERROR",
		// Without pause many tokens are alike, which it takes for a broken model.
		"REPEATED_STREAMING_CHUNK_LIMIT=1000000000",
		"NO_PROXY=127.0.0.1", "no_proxy=127.0.0.1",
	}
	p.ready = "/health/liveliness"
	p.within = 3 * time.Minute
	return p
}
