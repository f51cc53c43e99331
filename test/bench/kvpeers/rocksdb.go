package main

import (
	"bufio"
	"context"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// rocksdbSources are engine.cc, which links Debian's librocksdb and contains a port of this load.
//
//go:embed rocksdb/*.cc rocksdb/*.h
var rocksdbSources embed.FS

// errNoRocksDB: what RocksDB needs is not installed.
var errNoRocksDB = errors.New("RocksDB cannot be built")

// compiler is the C++ compiler.
const compiler = "c++"

// buildCXX compiles one of the programs in folder rocksdb into dir and returns its path. Errors: errNoRocksDB, with
// what is missing.
func buildCXX(ctx context.Context, dir, name string, libraries ...string) (string, error) {
	if _, err := exec.LookPath(compiler); err != nil {
		return "", fmt.Errorf("%w: there is no C++ compiler (apt-get install g++)", errNoRocksDB)
	}
	if len(libraries) > 0 {
		probe := exec.CommandContext(ctx, compiler, "-x", "c++", "-E", "-")
		probe.Stdin = strings.NewReader("#include <rocksdb/db.h>\n")
		if probe.Run() != nil {
			return "", fmt.Errorf("%w: there is no librocksdb (apt-get install librocksdb-dev)", errNoRocksDB)
		}
	}
	sources, err := fs.Sub(rocksdbSources, "rocksdb")
	if err != nil {
		return "", err
	}
	folder := filepath.Join(dir, name+"-source")
	if err := os.CopyFS(folder, sources); err != nil {
		return "", err
	}
	out := filepath.Join(dir, name)
	args := append([]string{"-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", out,
		filepath.Join(folder, name+".cc")}, libraries...)
	said, err := exec.CommandContext(ctx, compiler, args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", compiler, strings.Join(args, " "), err, said)
	}
	return out, nil
}

// buildRocksDB builds the engine's program.
func buildRocksDB(ctx context.Context, dir string) (string, error) {
	return buildCXX(ctx, dir, "engine", "-lrocksdb")
}

// isRocksDB says whether the engine is a program of its own.
func isRocksDB(engine string) bool { return strings.HasPrefix(engine, "rocksdb") }

// rocksdbProcess is the process of engine.cc; the comment there describes the commands.
type rocksdbProcess struct {
	cmd *exec.Cmd

	mu  sync.Mutex // for one command at a time
	in  io.WriteCloser
	out *bufio.Reader
}

// startRocksDB starts the program, which opens nothing yet.
func startRocksDB(ctx context.Context, cfg *Config) (*rocksdbProcess, error) {
	direct := "1"
	if cfg.Engine == "rocksdb-buffered" {
		direct = "0"
	}
	p := &rocksdbProcess{cmd: exec.CommandContext(ctx, cfg.Program, cfg.Dir, strconv.FormatInt(cfg.Objects, 10),
		strconv.Itoa(cfg.ValueBytes), strconv.Itoa(cfg.Workers), strconv.FormatUint(cfg.Seed, 10),
		strconv.FormatInt(cfg.MemoryBytes, 10), direct)}
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = bufio.NewReader(out)
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	return p, p.cmd.Start()
}

// stop ends the process, whose store is closed.
func (p *rocksdbProcess) stop() error {
	return errors.Join(p.in.Close(), p.cmd.Wait())
}

// kill returns when the process is dead.
func (p *rocksdbProcess) kill() {
	_ = p.cmd.Process.Kill() // if it is not running, Wait returns at once
	_ = p.cmd.Wait()         // it says that the process was killed
}

// command sends a line and returns the words of the answer.
func (p *rocksdbProcess) command(format string, args ...any) ([]string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err := fmt.Fprintf(p.in, format+"\n", args...); err != nil {
		return nil, fmt.Errorf("rocksdb: %w", err)
	}
	line, err := p.out.ReadString('\n')
	if err != nil {
		return nil, fmt.Errorf("rocksdb: %w", err)
	}
	kind, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
	if kind != "ok" {
		return nil, fmt.Errorf("rocksdb: %s", rest)
	}
	return strings.Fields(rest), nil
}

// rocksdbStore is RocksDB with bloom filters and without compression, which the values do not allow; with direct I/O
// for all but its log, unless it is rocksdb-buffered.
type rocksdbStore struct {
	process *rocksdbProcess
	// own: the process was started for this store.
	own bool
}

func openRocksDB(cfg *Config, durable bool) (engine, error) {
	s := &rocksdbStore{process: cfg.process, own: cfg.process == nil}
	if s.own {
		var err error
		if s.process, err = startRocksDB(context.Background(), cfg); err != nil {
			return nil, err
		}
	}
	sync := 0
	if durable {
		sync = 1
	}
	if _, err := s.process.command("open %d", sync); err != nil {
		return nil, err
	}
	return s, nil
}

func (s *rocksdbStore) session() session { return s }

// do is for single operations. The phases run in the process.
func (s *rocksdbStore) do(o *op) {
	if o.put {
		_, o.err = s.process.command("one-put %x %x", o.key, o.value)
		return
	}
	words, err := s.process.command("one-get %x", o.key)
	if o.err = err; err != nil {
		return
	}
	v, err := hex.DecodeString(strings.Join(words, ""))
	o.value, o.err = o.value[:copy(o.value, v)], err
}

// phase has the process do all that the crowd has to, and takes its counts.
func (s *rocksdbStore) phase(c *crowd) error {
	line := "get"
	switch {
	case c.loading:
		line = "load"
	case c.put:
		line = "put"
	}
	if !c.loading {
		line += " " + strconv.FormatInt(max(c.cfg.PhaseTime.Milliseconds(), 1), 10)
	}
	words, err := s.process.command("%s", line)
	if err != nil {
		return err
	}
	return c.take(words)
}

// take reads how many values were checked, and pairs of a latency and a count.
func (c *crowd) take(words []string) error {
	if len(words)%2 == 0 {
		return fmt.Errorf("rocksdb: %d words", len(words))
	}
	numbers := make([]int64, len(words))
	for i, w := range words {
		n, err := strconv.ParseInt(w, 10, 64)
		if err != nil {
			return fmt.Errorf("rocksdb: %w", err)
		}
		numbers[i] = n
	}
	c.checked.Add(numbers[0])
	for i := 1; i < len(numbers); i += 2 {
		if err := c.hist.RecordValues(min(numbers[i], maxLatencyNS), numbers[i+1]); err != nil {
			return fmt.Errorf("rocksdb: %w", err)
		}
	}
	return nil
}

func (s *rocksdbStore) settled() bool {
	words, err := s.process.command("settled")
	return err == nil && len(words) == 1 && words[0] == "1"
}

func (s *rocksdbStore) ready() {}

func (s *rocksdbStore) close() error {
	_, err := s.process.command("close")
	if s.own {
		err = errors.Join(err, s.process.stop())
	}
	return err
}
