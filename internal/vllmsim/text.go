package vllmsim

import "strings"

// story is what the simulated model says, over and over, from a place that
// depends on the prompt. Plain ASCII: it needs no escaping in JSON.
const story = `The harbour was quiet when the small boat came in. ` +
	`An old woman on the pier counted the waves and wrote each number in a book. ` +
	`Nobody had asked her to, but the numbers were always right. ` +
	`Some days the sea was fast, some days it was slow, and some days it only remembered what it had said before. ` +
	`She never guessed. When a wave was hidden by the fog, she left the line empty and turned the page. ` +
	`The sailors read her book in the evening and knew how the day had been.`

// words are the tokens of the story; sentenceStarts are indices into words.
var words, sentenceStarts = splitStory()

func splitStory() (words []string, starts []int) {
	words = strings.Fields(story)
	for i := range words {
		if i == 0 || strings.HasSuffix(words[i-1], ".") {
			starts = append(starts, i)
		}
	}
	return words, starts
}

// firstWord is the index of the word that an answer begins with.
func firstWord(seed uint64, choice int) int {
	return sentenceStarts[(seed+uint64(choice))%uint64(len(sentenceStarts))]
}

// naturalLength is the number of tokens after which an answer ends by itself:
// 40 to 119 words and an end-of-sequence token without text.
func naturalLength(seed uint64) int { return 40 + int((seed>>8)%80) + 1 }

// appendWord appends the text of token i of an answer. All but the first have
// a space before them.
func appendWord(dst []byte, first, i int) []byte {
	if i > 0 {
		dst = append(dst, ' ')
	}
	return append(dst, words[(first+i)%len(words)]...)
}
