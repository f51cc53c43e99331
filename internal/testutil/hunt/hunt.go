// Package hunt runs a simulated history in which a fault is planted, and tells what has shown the fault. A simulation
// that finds no planted fault proves nothing.
package hunt

import "fmt"

// Reporter is what a history needs of a test: that of a *testing.T, or of one that is to fail.
type Reporter interface {
	Errorf(format string, args ...any)
	// Fatalf does not return.
	Fatalf(format string, args ...any)
	Logf(format string, args ...any)
	Failed() bool
}

// hunter is a Reporter that keeps the first failure.
type hunter struct {
	found  string
	failed bool
}

func (h *hunter) Errorf(format string, args ...any) {
	if !h.failed {
		h.found, h.failed = fmt.Sprintf(format, args...), true
	}
}

func (h *hunter) Fatalf(format string, args ...any) {
	h.Errorf(format, args...)
	panic(h)
}

func (h *hunter) Logf(string, ...any) {}
func (h *hunter) Failed() bool        { return h.failed }

// Run runs a history, and returns the first failure, which may be a panic; empty: there was none.
func Run(history func(t Reporter)) (found string) {
	h := &hunter{}
	defer func() {
		if p := recover(); p != nil && p != h {
			h.Errorf("panic: %v", p)
		}
		found = h.found
	}()
	history(h)
	return
}
