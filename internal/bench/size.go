package bench

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// ParseSize reads a size as fio does: a number with an optional suffix. k, m, g, t (with
// or without b or ib) are powers of 1024; 4k, 4K, 4KiB and 4096 are the same.
func ParseSize(s string) (int64, error) {
	t := strings.ToLower(strings.TrimSpace(s))
	i := strings.LastIndexFunc(t, func(r rune) bool { return r >= '0' && r <= '9' || r == '.' }) + 1
	num, suffix := t[:i], strings.TrimSpace(t[i:])
	shift, ok := map[string]uint{
		"": 0, "b": 0, "k": 10, "kb": 10, "kib": 10, "m": 20, "mb": 20, "mib": 20,
		"g": 30, "gb": 30, "gib": 30, "t": 40, "tb": 40, "tib": 40, "p": 50, "pb": 50, "pib": 50,
	}[suffix]
	f, err := strconv.ParseFloat(num, 64)
	if err != nil || !ok || f < 0 || f*float64(int64(1)<<shift) > math.MaxInt64/2 {
		return 0, fmt.Errorf("size %q: must be a number with an optional suffix k, m, g or t (powers of 1024), as 4k "+
			"or 1.5g", s)
	}
	if n, err := strconv.ParseInt(num, 10, 64); err == nil {
		return n << shift, nil
	}
	return int64(f * float64(int64(1)<<shift)), nil
}

// FormatSize is the inverse, in the largest unit that divides n.
func FormatSize(n int64) string {
	for _, u := range []struct {
		shift uint
		name  string
	}{{40, "TiB"}, {30, "GiB"}, {20, "MiB"}, {10, "KiB"}} {
		if n != 0 && n%(1<<u.shift) == 0 {
			return fmt.Sprintf("%d%s", n>>u.shift, u.name)
		}
	}
	return fmt.Sprintf("%dB", n)
}
