//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// row is what one row of the table measures.
type row struct {
	lengths, source string
	concurrency     int
	answers         string // streamed or JSON
	direct          bool   // a client more, that does not come through the sidecar
	hidden          bool   // usage does not tell cached tokens
}

// rows are all rows of the table.
func (o *options) rows() (rows []row) {
	for _, lengths := range strings.Split(o.Lengths, ",") {
		for _, source := range o.Sources {
			add := func(concurrency []int, r row) {
				for _, c := range concurrency {
					for _, answers := range o.Answers {
						if answers == "JSON" && source == "observed" {
							continue // there is nothing to observe
						}
						r.lengths, r.source, r.concurrency, r.answers = lengths, source, c, answers
						rows = append(rows, r)
					}
				}
			}
			add(o.Concurrency, row{})
			if source == "window" {
				add(o.Direct, row{direct: true})
				add(o.Hidden, row{hidden: true})
			}
		}
	}
	return rows
}

// perClient bounds how many requests one client sends, so that rows with few of them end.
const perClient = 40

// measure sends the row's load to the sidecar.
func (r row) measure(ctx context.Context, o options, number uint64, sidecar, vllm string) (summary, error) {
	l := load{
		url: sidecar, lengths: lengths[r.lengths], stream: r.answers == "streamed", concurrency: r.concurrency,
		requests: max(2*r.concurrency, min(o.Requests, perClient*r.concurrency)),
		seed:     o.Seed<<16 + number, // the same requests again would all be in the prefix cache
	}
	if !r.direct {
		results, err := l.run(ctx)
		return summarise(results), err
	}
	other := l
	other.url, other.seed = vllm, l.seed+1<<15
	stop := other.beside(ctx)
	results, err := l.run(ctx)
	answers, otherErr := stop()
	if otherErr == nil && answers == 0 {
		otherErr = errors.New("it got no answer in all that time")
	}
	if otherErr != nil {
		err = errors.Join(err, fmt.Errorf("the direct client: %w", otherErr))
	}
	return summarise(results), err
}

// atOnce is how many requests are with vLLM at the same time, and what is special.
func (r row) atOnce() string {
	s := fmt.Sprint(r.concurrency)
	if r.direct {
		s += " + 1 direct"
	}
	if r.hidden {
		s += ", cached not told"
	}
	return s
}

func (r row) String() string {
	return fmt.Sprintf("%s, %s, %s at once, %s", r.lengths, r.source, r.atOnce(), r.answers)
}
