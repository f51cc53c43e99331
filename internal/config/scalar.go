package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Bytes is a number of bytes. In YAML it is a whole number, bare or with B, KiB,
// MiB, GiB or TiB.
type Bytes int64

var byteUnits = []struct {
	suffix string
	size   Bytes
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}}

const bytesAllowed = "a whole number, bare or with KiB, MiB, GiB or TiB, as in 8GiB"

// ParseBytes reads what String writes.
//
// Errors: one that says what is allowed.
func ParseBytes(s string) (Bytes, error) {
	digits, unit := s, Bytes(1)
	for _, u := range byteUnits {
		if d, ok := strings.CutSuffix(s, u.suffix); ok {
			digits, unit = strings.TrimRight(d, " "), u.size
			break
		}
	}
	if digits == "" || strings.Trim(digits, "0123456789") != "" {
		return 0, fmt.Errorf("%q is not a size; allowed: %s", s, bytesAllowed)
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n > math.MaxInt64/int64(unit) {
		return 0, fmt.Errorf("%q is too large; allowed: less than 8388608TiB", s)
	}
	return Bytes(n) * unit, nil
}

// String writes the largest unit that divides the number: 8GiB, 1536MiB, 4097.
func (b Bytes) String() string {
	for _, u := range byteUnits {
		if u.size > 1 && b >= u.size && b%u.size == 0 {
			return strconv.FormatInt(int64(b/u.size), 10) + u.suffix
		}
	}
	return strconv.FormatInt(int64(b), 10)
}

const durationAllowed = "a number with ns, us, ms, s, m or h, as in 30s"

func parseDuration(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil {
		return 0, fmt.Errorf("%q is not a duration; allowed: %s", s, durationAllowed)
	}
	return d, nil
}

// formatDuration writes 2m instead of 2m0s, so that what is printed is what one types.
func formatDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
