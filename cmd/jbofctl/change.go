package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"jbofd/internal/admin"
)

// showEvery is how often a command asks how far the change is that it waits for.
var showEvery = time.Second

// askChange is ask for a request that may have to wait for another change, or takes long itself. On a terminal it shows
// for what; if the time is over the error says so.
func askChange[T any](x *cli, c *cobra.Command, what func(*admin.Client, context.Context) (T, error)) (T, error) {
	done, shown := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(shown)
		if isTerminal(c.ErrOrStderr()) {
			x.showChange(c, done)
		}
	}()
	answer, err := ask(x, c, what)
	close(done)
	<-shown
	if errors.Is(err, context.DeadlineExceeded) {
		if s, statusErr := x.client().Status(c.Context()); statusErr == nil && s.Change != nil {
			err = fmt.Errorf("%w; what is under way: %s", err, s.Change)
		}
	}
	return answer, err
}

// showChange shows what change is under way, and how far, until done.
func (x *cli) showChange(c *cobra.Command, done <-chan struct{}) {
	tick := time.NewTicker(showEvery)
	defer tick.Stop()
	for width := 0; ; {
		select {
		case <-done:
			if width > 0 {
				fmt.Fprintln(c.ErrOrStderr())
			}
			return
		case <-tick.C:
		}
		s, err := x.client().Status(c.Context())
		if err != nil || s.Change == nil {
			continue // the request itself says what is wrong
		}
		line := s.Change.String()
		fmt.Fprint(c.ErrOrStderr(), "\r", line, strings.Repeat(" ", max(0, width-len(line))))
		width = len(line)
	}
}
