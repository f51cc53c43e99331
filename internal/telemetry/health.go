package telemetry

import (
	"sort"
	"sync"
)

// Health knows why the daemon is not ready, if it is not. All its methods may be
// called from any goroutine.
type Health struct {
	// mu guards what follows.
	mu      sync.Mutex
	blocked map[string]string
	watched map[string]func() error
}

// Reason is one reason not to be ready.
type Reason struct {
	// Component is what is not ready: "daemon", "ssd ssd0".
	Component string `json:"component"`
	// Reason says why.
	Reason string `json:"reason"`
}

func newHealth() *Health {
	return &Health{blocked: map[string]string{}, watched: map[string]func() error{}}
}

// Block makes the daemon not ready for a component's sake until Clear.
func (h *Health) Block(component, reason string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.blocked[component] = reason
}

// Clear takes back what Block said of a component.
func (h *Health) Clear(component string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.blocked, component)
}

// watch asks f about the component whenever somebody asks us; nil forgets it.
func (h *Health) watch(component string, f func() error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f == nil {
		delete(h.watched, component)
		return
	}
	h.watched[component] = f
}

// Reasons returns why the daemon is not ready, by component; empty when it is.
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

// Ready reports that there is no reason not to be.
func (h *Health) Ready() bool { return len(h.Reasons()) == 0 }
