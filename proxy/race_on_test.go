//go:build race

package proxy

// raceEnabled says that the race detector makes everything several times slower.
const raceEnabled = true
