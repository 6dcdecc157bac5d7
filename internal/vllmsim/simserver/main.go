// Command simserver runs a simulated vLLM as its own process.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/vllm-timings/vllm-timings/internal/vllmsim"
)

type options struct {
	Listen              string        `default:"127.0.0.1:8000" help:"Address to listen on; port 0 is a free one."`
	Version             string        `default:"0.32.0" help:"vLLM version to imitate."`
	Model               []string      `default:"tiny" help:"Served model names; the first one is the label on /metrics."`
	PrefillTPS          float64       `name:"prefill-tps" default:"10000" help:"Prompt tokens computed per second; negative: prefill takes no time."`
	DecodeStep          time.Duration `default:"20ms" help:"Duration of an engine step; negative: no pause."`
	MaxRunning          int           `default:"1024" help:"Requests that run at once; others queue."`
	MaxModelLen         int           `default:"32768" help:"Largest number of prompt and completion tokens."`
	PrefixCacheBlock    int           `default:"16" help:"Tokens in a block of the prefix cache."`
	PerRequestMetrics   bool          `help:"As vLLM's --enable-per-request-metrics."`
	PromptTokensDetails bool          `help:"As vLLM's --enable-prompt-tokens-details."`
	ForceIncludeUsage   bool          `help:"As vLLM's --enable-force-include-usage."`
	DisableLogStats     bool          `help:"As vLLM's --disable-log-stats."`
	FilteredMetrics     bool          `default:"true" negatable:"" help:"Let /metrics/?name[]= filter."`
	DevMode             bool          `env:"VLLM_SERVER_DEV_MODE" help:"As VLLM_SERVER_DEV_MODE=1: serve /sleep and /wake_up."`
	EnableSleepMode     bool          `help:"As vLLM's --enable-sleep-mode."`
	WakeTime            time.Duration `help:"How long waking up takes."`
	APIKey              string        `name:"api-key" help:"As vLLM's --api-key."`
}

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) int {
	var o options
	parser, err := kong.New(&o, kong.Name("simserver"), kong.Description("A simulated vLLM."), kong.Writers(stdout, stderr))
	if err != nil {
		fmt.Fprintln(stderr, "simserver:", err)
		return 1
	}
	if _, err := parser.Parse(args); err != nil {
		fmt.Fprintln(stderr, "simserver:", err)
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	server, err := vllmsim.Listen(o.Listen, vllmsim.Config{
		Version: o.Version, Models: o.Model, PrefillTokensPerSecond: o.PrefillTPS, DecodeStep: o.DecodeStep,
		MaxRunning: o.MaxRunning, MaxModelLen: o.MaxModelLen, PrefixCacheBlock: o.PrefixCacheBlock,
		PerRequestMetrics: o.PerRequestMetrics, PromptTokensDetails: o.PromptTokensDetails,
		ForceIncludeUsage: o.ForceIncludeUsage, DisableLogStats: o.DisableLogStats,
		FilteredMetrics: o.FilteredMetrics, APIKey: o.APIKey,
		DevMode: o.DevMode, SleepMode: o.EnableSleepMode, WakeTime: o.WakeTime,
	})
	if err != nil {
		fmt.Fprintln(stderr, "simserver:", err)
		return 1
	}
	defer server.Close()
	fmt.Fprintf(stdout, "simulated vLLM %s listening on %s\n", o.Version, server.URL)
	<-ctx.Done()
	return 0
}
