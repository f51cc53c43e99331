package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// kills is how often each engine is killed.
const kills = 3

// Recovery is an opening of the store after a kill.
type Recovery struct {
	// OpenMS is how long opening took, up to the answer of the first GET.
	OpenMS float64
	// Checked is how many values were read and found right afterwards.
	Checked int64
}

// crash kills the engine's process in the middle of PUTs, half a phase after they have begun. It returns only if
// it fails.
func (c *Config) crash(ctx context.Context, e engine) error {
	forever := *c
	forever.PhaseTime = time.Hour
	put := &crowd{cfg: &forever, put: true}
	kill := time.AfterFunc(c.PhaseTime/2, func() {
		if c.process != nil {
			c.process.kill() // first, so that it is gone when the next one opens the store
		}
		_ = unix.Kill(os.Getpid(), unix.SIGKILL) // the parent finds out if that failed
	})
	_, err := put.work(ctx, e)
	if !kill.Stop() {
		<-ctx.Done() // the kill of this process comes after that of the engine's
	}
	return errors.Join(errors.New("the PUTs ended before the kill"), err)
}

// recovered opens the store that a killed process has left. Nothing of it is in the page cache then, as after an
// outage of the machine.
func recovered(ctx context.Context, cfg Config, report func(any) error) (err error) {
	if err := syncFiles(cfg.Dir); err != nil {
		return err
	}
	(&watch{cfg: &cfg}).drop()
	watch := startWatch(&cfg)
	defer watch.close()
	o := op{value: make([]byte, cfg.ValueBytes)}
	putKey(&o.key, o.index)
	begin := time.Now()
	e, err := engines[cfg.Engine](&cfg, true)
	if err != nil {
		return fmt.Errorf("reopen: %w", err)
	}
	defer func() { err = errors.Join(err, e.close()) }()
	if e.session().do(&o); o.err != nil {
		return fmt.Errorf("GET: %w", o.err)
	}
	r := Recovery{OpenMS: float64(time.Since(begin).Microseconds()) / 1e3}
	if _, err := checkValue(o.value, make([]byte, cfg.ValueBytes), o.index); err != nil {
		return err
	}
	e.ready()
	short := cfg
	short.PhaseTime = min(cfg.PhaseTime, 2*time.Second)
	check := &crowd{cfg: &short}
	if _, err := check.work(ctx, e); err != nil {
		return fmt.Errorf("check: %w", err)
	}
	r.Checked = check.checked.Load()
	if err := report(r); err != nil || !cfg.Kill {
		return err
	}
	return cfg.crash(ctx, e)
}

// syncFiles writes the dirty pages of dir's file system, because only clean ones can be dropped.
func syncFiles(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(f.Fd())), f.Close())
}
