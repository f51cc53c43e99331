//go:build spdk && cgo

package spdk

import "jbofd/internal/ssd"

// Crossings is how many calls into C a queue has made.
func Crossings(q ssd.Queue) int {
	own := q.(*queue)
	own.mu.Lock()
	defer own.mu.Unlock()
	return own.crossings
}
