package config

import (
	"fmt"
	"regexp"
	"unicode/utf8"

	"jbofd/internal/nvme"
)

var nqnForm = regexp.MustCompile(`^nqn\.[0-9]{4}-(0[1-9]|1[0-2])\.[^\s\x00-\x1f]+$`)

// checkNQN returns nil for an NVMe Qualified Name (NVMe Base 2.0, section 4.5).
func checkNQN(s string) error {
	if len(s) > nvme.MaxNQNLen || !utf8.ValidString(s) || !nqnForm.MatchString(s) {
		return fmt.Errorf("%q is not an NQN; allowed: nqn.YYYY-MM.reverse.domain:text, at most %d bytes of UTF-8", s, nvme.MaxNQNLen)
	}
	return nil
}
