package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"jbofd/internal/admin"
)

// process is the daemon.
type process struct {
	cmd *exec.Cmd
	log string
	// exited is closed when the process has ended; then err is how.
	exited chan struct{}
	err    error
}

// startDaemon starts jbofd. Its log goes to data/demo.log.
func startDaemon(cfg *Config, args []string) (*process, error) {
	dir := filepath.Join(cfg.Dir, "data")
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, err
	}
	log := filepath.Join(dir, "demo.log")
	if err := os.Remove(log); err != nil && !errors.Is(err, os.ErrNotExist) { // of an earlier demonstration
		return nil, err
	}
	return startProcess(cfg.Daemon, cfg.Dir, log, cfg.Environ, args)
}

// startProcess starts jbofd in a directory, with a log that is kept.
func startProcess(daemon, dir, logPath string, environ, args []string) (*process, error) {
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return nil, err
	}
	defer log.Close() // the process has its own
	program, err := filepath.Abs(daemon)
	if err != nil {
		return nil, err
	}
	p := &process{cmd: exec.Command(program, args...), log: log.Name(), exited: make(chan struct{})}
	p.cmd.Dir, p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr = dir, environ, log, log
	// A group of its own: what the terminal sends at Ctrl-C reaches the demonstration
	// only, which then stops the daemon in order.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start jbofd: %w", err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.exited)
	}()
	return p, nil
}

// waitReady waits until the daemon says on its admin socket that it is ready.
func (p *process) waitReady(ctx context.Context, socket string) (admin.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	c := admin.NewClient(socket)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var last error
	for {
		st, err := c.Status(ctx)
		if err == nil && st.Ready && len(st.Addresses.Listeners) > 0 {
			return st, nil
		}
		if ctx.Err() == nil {
			last = err
			if err == nil {
				last = fmt.Errorf("it says that it is not ready: %v", st.Reasons)
			}
		}
		select {
		case <-tick.C:
		case <-p.exited:
			return admin.Status{}, p.logTailError("jbofd ended before it was ready")
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return admin.Status{},
					errors.Join(p.logTailError(fmt.Sprintf("jbofd was not ready after %v", startTimeout)), last)
			}
			return admin.Status{}, ctx.Err()
		}
	}
}

// stop ends the daemon by SIGTERM and judges its exit status; the process is gone
// when it returns. A second call does nothing.
func (p *process) stop() error {
	select {
	case <-p.exited:
	default:
		if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return fmt.Errorf("stop jbofd: %w", err)
		}
		late := time.NewTimer(stopTimeout)
		defer late.Stop()
		select {
		case <-p.exited:
		case <-late.C:
			_ = p.cmd.Process.Kill() // it may have ended this moment
			<-p.exited
			return p.logTailError(fmt.Sprintf("jbofd did not stop within %v of SIGTERM and was killed", stopTimeout))
		}
	}
	if p.err != nil {
		return p.logTailError("jbofd did not end well: " + p.err.Error())
	}
	return nil
}

// logTailError makes an error of the end of the daemon's log.
func (p *process) logTailError(what string) error {
	const most = 15
	text, err := os.ReadFile(p.log)
	if err != nil {
		return fmt.Errorf("%s (and its log cannot be read: %w)", what, err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(lines) > most {
		lines = lines[len(lines)-most:]
	}
	return fmt.Errorf("%s; its log %s ends with:\n  %s", what, p.log, strings.Join(lines, "\n  "))
}
