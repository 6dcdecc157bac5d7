package vllmsim

import (
	"encoding/binary"
	"hash/fnv"
	"strings"
)

// bytesPerToken is the whole tokenizer: a token is four bytes, at least one.
const bytesPerToken = 4

// maxCachedBlocks bounds the prefix cache; the oldest blocks go first.
const maxCachedBlocks = 1 << 16

// prompt is a tokenised prompt.
type prompt struct {
	text   string // as echo shows it; empty for a prompt of token ids
	chars  int
	tokens int
	seed   uint64 // the same for the same prompt; chooses the answer

	// blocks are the hashes of the prompt's whole blocks; each covers all
	// tokens before it too.
	blocks []uint64
}

// newPrompt tokenises raw, which is either text or four bytes a token id.
func newPrompt(raw []byte, block int) prompt {
	p := prompt{chars: len(raw), tokens: max(1, len(raw)/bytesPerToken)}
	h := fnv.New64a()
	size := block * bytesPerToken
	// The last token is always computed, so a block that ends with it is
	// never looked up: it is cached for longer prompts only.
	for i := 0; i+size <= len(raw); i += size {
		_, _ = h.Write(raw[i : i+size])
		p.blocks = append(p.blocks, h.Sum64())
	}
	_, _ = h.Write(raw[len(p.blocks)*size:])
	p.seed = h.Sum64()
	return p
}

// tokenBytes is the raw form of a prompt of token ids.
func tokenBytes(ids []int) []byte {
	raw := make([]byte, 0, len(ids)*bytesPerToken)
	for _, id := range ids {
		raw = binary.LittleEndian.AppendUint32(raw, uint32(id))
	}
	return raw
}

// chatText is the chat template.
func chatText(messages []message) string {
	var b strings.Builder
	b.WriteString("<s>\n")
	for _, m := range messages {
		b.WriteString("<|" + m.role + "|>\n" + m.content + "<|end|>\n")
	}
	b.WriteString("<|assistant|>\n")
	return b.String()
}

// prefixCache holds the hashes of computed blocks.
type prefixCache struct {
	known map[uint64]struct{}
	order []uint64 // oldest first
}

func newPrefixCache() *prefixCache { return &prefixCache{known: map[uint64]struct{}{}} }

// lookup returns how many of p's tokens are cached, and caches all its blocks:
// created tokens more.
func (c *prefixCache) lookup(p *prompt, block int) (cached, created int) {
	for i, h := range p.blocks {
		if _, ok := c.known[h]; !ok || (i+1)*block >= p.tokens {
			break
		}
		cached += block
	}
	for _, h := range p.blocks {
		if _, ok := c.known[h]; ok {
			continue
		}
		if len(c.order) == maxCachedBlocks {
			delete(c.known, c.order[0])
			c.order = c.order[1:]
		}
		c.known[h] = struct{}{}
		c.order = append(c.order, h)
		created += block
	}
	return cached, created
}
