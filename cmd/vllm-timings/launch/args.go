package launch

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Flags of vLLM that matter here.
const (
	perRequestMetrics   = "--enable-per-request-metrics"
	promptTokensDetails = "--enable-prompt-tokens-details"
	disableLogStats     = "--disable-log-stats"
	sleepMode           = "--enable-sleep-mode"
)

// Flag returns the value of a flag in a command, --name value or --name=value. The last one counts, as in vLLM.
func Flag(argv []string, name string) (value string, ok bool) {
	for i, arg := range argv {
		if i == 0 {
			continue
		}
		if v, found := strings.CutPrefix(arg, name+"="); found {
			value, ok = v, true
		} else if arg == name {
			value, ok = "", true
			if i+1 < len(argv) {
				value = argv[i+1]
			}
		}
	}
	return value, ok
}

// hasSwitch reports whether a command has a switch of vLLM's, also as --no-..., with underscores, or shortened in a way
// that is no other's.
func hasSwitch(argv []string, name string) bool {
	shortest := strings.LastIndexByte(name, '-') + 1
	return len(argv) > 1 && slices.ContainsFunc(argv[1:], func(arg string) bool {
		arg, _, _ = strings.Cut(arg, "=")
		arg = strings.ReplaceAll(arg, "_", "-")
		if no, ok := strings.CutPrefix(arg, "--no-"); ok {
			arg = "--" + no
		}
		return len(arg) > shortest && strings.HasPrefix(name, arg)
	})
}

// configHas reports whether the file that --config names, if any, speaks of a flag. What cannot be read counts as if it did.
func configHas(argv []string, name string) bool {
	file, ok := Flag(argv, "--config")
	if !ok {
		return false
	}
	text, err := os.ReadFile(file)
	key := strings.TrimPrefix(name, "--")
	return err != nil || strings.Contains(strings.ReplaceAll(string(text), "_", "-"), key)
}

// server says which words of a command are a vLLM that serves: those from at on. The Python that runs it is python, or "" for
// what the program itself names.
type server struct {
	program string // the executable of vLLM's command, if it is one
	python  string
	project string // for uv: where to look for the environment
}

// findServer looks for a vLLM that serves in a command. It knows vllm serve, python -m vllm.entrypoints..., and both behind
// uv run and env.
func findServer(argv []string) (s server, ok bool) {
	words := argv
	for len(words) > 0 {
		switch name := filepath.Base(words[0]); {
		case name == "vllm":
			return server{program: words[0], project: s.project}, len(words) > 1 && words[1] == "serve"
		case strings.HasPrefix(name, "python"):
			return pythonServer(words, s.project)
		case name == "uv" && slices.Contains(words, "run"):
			s.project = "."
			words = words[1:]
			for len(words) > 0 && filepath.Base(words[0]) != "vllm" && !strings.HasPrefix(filepath.Base(words[0]), "python") {
				switch {
				case strings.HasPrefix(words[0], "--with") || words[0] == "--isolated": // an environment of its own
					return s, false
				case (words[0] == "--project" || words[0] == "--directory") && len(words) > 1:
					s.project = words[1]
					words = words[1:]
				default:
					if _, v, found := strings.Cut(words[0], "="); found && (strings.HasPrefix(words[0], "--project=") || strings.HasPrefix(words[0], "--directory=")) {
						s.project = v
					}
				}
				words = words[min(1, len(words)):]
			}
		case name == "env" && s.project == "":
			for words = words[1:]; len(words) > 0 && strings.Contains(words[0], "="); {
				words = words[1:]
			}
		default:
			return s, false
		}
	}
	return s, false
}

func pythonServer(words []string, project string) (server, bool) {
	for i, word := range words[1:] {
		rest := words[i+2:]
		switch {
		case word == "-m":
			if len(rest) == 0 {
				return server{}, false
			}
			module := rest[0]
			ok := strings.HasPrefix(module, "vllm.entrypoints.") && strings.Contains(module, "api_server") ||
				module == "vllm.entrypoints.cli.main" && len(rest) > 1 && rest[1] == "serve"
			return server{python: words[0], project: project}, ok
		case strings.HasPrefix(word, "-"):
		default:
			return server{python: words[0], project: project}, filepath.Base(word) == "vllm" && len(rest) > 0 && rest[0] == "serve"
		}
	}
	return server{}, false
}
