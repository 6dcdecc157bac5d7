package proxy

// Explain names in few words why vLLM did not answer, and says what mends it, "" where that cannot be known.
func Explain(err error) (kind, remedy string) {
	kind = kindOf(err)
	return kind, remedies[kind]
}

// HasNative reports whether a vLLM of that version has --enable-per-request-metrics. An unknown version counts as new.
func HasNative(version string) bool { return version == "" || atLeast(version, 0, 25) }
