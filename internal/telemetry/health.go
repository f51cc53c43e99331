package telemetry

import (
	"sort"
	"sync"
)

// Health records the reasons for which the daemon is not ready. All its methods may be called from any goroutine.
type Health struct {
	// mu guards the following fields.
	mu      sync.Mutex
	blocked map[string]string
	watched map[string]func() error
}

// Reason is one reason for which the daemon is not ready.
type Reason struct {
	// Component is the component that is not ready, for example "daemon" or "ssd ssd0".
	Component string `json:"component"`
	// Reason is the reason as text.
	Reason string `json:"reason"`
}

func newHealth() *Health {
	return &Health{blocked: map[string]string{}, watched: map[string]func() error{}}
}

// Block makes the daemon not ready, on behalf of a component, until Clear.
func (h *Health) Block(component, reason string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.blocked[component] = reason
}

// Clear removes the component's reason.
func (h *Health) Clear(component string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.blocked, component)
}

// watch makes Reasons call f for the state of the component; a nil f removes the function.
func (h *Health) watch(component string, f func() error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f == nil {
		delete(h.watched, component)
		return
	}
	h.watched[component] = f
}

// Reasons returns the reasons for which the daemon is not ready, sorted by component. The result is empty if it is
// ready.
func (h *Health) Reasons() []Reason {
	type watched struct {
		component string
		f         func() error
	}
	out := []Reason{}
	h.mu.Lock()
	for c, r := range h.blocked {
		out = append(out, Reason{c, r})
	}
	var ask []watched
	for c, f := range h.watched {
		ask = append(ask, watched{c, f})
	}
	h.mu.Unlock()
	for _, w := range ask {
		if err := w.f(); err != nil {
			out = append(out, Reason{w.component, err.Error()})
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Component < out[j].Component })
	return out
}

// Ready reports whether the daemon is ready.
func (h *Health) Ready() bool { return len(h.Reasons()) == 0 }
