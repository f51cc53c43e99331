package vm

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
)

// process is a child that does not outlive the test, even when the test is killed.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when the child has ended and its output is read
	err  error         // what Wait returned; valid when done is closed
}

// startProcess starts cmd. The kernel sends the child SIGKILL when the thread that made it ends, so one thread stays
// with each child until its end.
func startProcess(cmd *exec.Cmd) (*process, error) {
	p := &process{cmd: cmd, done: make(chan struct{})}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// exited says whether the child has ended.
func (p *process) exited() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

func (p *process) ended() <-chan struct{}        { return p.done }
func (p *process) outcome() error                { return p.err }
func (p *process) signal(s syscall.Signal) error { return p.cmd.Process.Signal(s) }

func (p *process) openFiles() (int, error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid))
	return len(entries), err
}

// kill sends SIGKILL and waits for the end.
func (p *process) kill() {
	p.cmd.Process.Kill() // fails if the child has ended, which is the intention
	<-p.done
}
