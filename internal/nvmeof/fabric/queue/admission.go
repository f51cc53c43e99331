package queue

import (
	"errors"
	"fmt"
	"sync"

	"jbofd/internal/telemetry"
)

// Admission bounds the connections of all transports together.
type Admission struct {
	// MaxConnections bounds all connections, MaxPerHost those of one host NQN.
	maxConnections, maxPerHost int
	tel                        *telemetry.Telemetry

	mu      sync.Mutex
	open    int
	perHost map[string]int
}

// NewAdmission bounds connections: all of them, and those of one host NQN.
func NewAdmission(maxConnections, maxPerHost int, tel *telemetry.Telemetry) *Admission {
	return &Admission{maxConnections: maxConnections, maxPerHost: maxPerHost, tel: tel, perHost: map[string]int{}}
}

// ErrShuttingDown: the target takes no more connections.
var ErrShuttingDown = errors.New("shutting down")

// Enter counts one more connection; Leave follows unless it fails.
//
// Errors: that there are too many.
func (a *Admission) Enter() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.open >= a.maxConnections {
		a.tel.ConnectionRefused("connections")
		return fmt.Errorf("%d connections are open, the limit (limits.connections)", a.open)
	}
	a.open++
	return nil
}

// Leave counts one connection less.
func (a *Admission) Leave() {
	a.mu.Lock()
	a.open--
	a.mu.Unlock()
}

// enterHost counts a connection of a host and reports whether there may be one more.
func (a *Admission) enterHost(hostNQN string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.perHost[hostNQN] >= a.maxPerHost {
		return false
	}
	a.perHost[hostNQN]++
	return true
}

func (a *Admission) leaveHost(hostNQN string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.perHost[hostNQN]--; a.perHost[hostNQN] <= 0 {
		delete(a.perHost, hostNQN)
	}
}
