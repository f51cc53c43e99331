package daemon

import (
	"errors"
	"io"
	"log/slog"
	"sync"
	"time"

	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/telemetry"
)

// NewLog returns the logger that a configuration asks for: format is text or json.
func NewLog(w io.Writer, format string, level slog.Leveler) *slog.Logger {
	o := &slog.HandlerOptions{Level: level}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}

func (n *Node) setLevel(name string) {
	var l slog.Level
	if l.UnmarshalText([]byte(name)) == nil {
		n.level.Set(l)
	}
}

// deviceLogEvery is the shortest time between two equal log lines of a drive. A full drive fails every write, and
// each failure would be a line.
const deviceLogEvery = 10 * time.Second

// deviceFailure is a request that a device failed.
type deviceFailure struct {
	op  pipeline.Op
	err error
}

// deviceLog logs the requests that a device fails, at a bounded rate. A drive reports failures during its turn, which
// must not block on standard error. So deviceLog has a goroutine that writes the lines.
type deviceLog struct {
	failures chan deviceFailure
	dropped  func(int)
	stopped  sync.WaitGroup
}

// newDeviceLog starts the log of a drive.
func newDeviceLog(log *slog.Logger, name string, dropped func(int)) *deviceLog {
	l := &deviceLog{failures: make(chan deviceFailure, 16), dropped: dropped}
	limited := slog.New(telemetry.LimitHandler(log.Handler(), telemetry.LimitOptions{Lines: 1, Every: deviceLogEvery,
		Dropped: dropped})).With("ssd", name)
	l.stopped.Go(func() {
		for f := range l.failures {
			switch {
			case errors.Is(f.err, ssd.ErrNoSpace):
				limited.Error("no space left for the file of the drive: writes fail until there is some",
					"op", f.op.String(), "error", f.err)
			case errors.Is(f.err, ssd.ErrGone):
				limited.Error("the drive is gone: requests to it fail", "op", f.op.String(), "error", f.err)
			default:
				limited.Error("the drive failed a request", "op", f.op.String(), "error", f.err)
			}
		}
	})
	return l
}

// failed records a failed request. It does not block; the drive calls it from one goroutine at a time.
func (l *deviceLog) failed(op pipeline.Op, err error) {
	select {
	case l.failures <- deviceFailure{op, err}:
	default:
		l.dropped(1)
	}
}

// close writes the lines of all recorded failures and ends the goroutine. The drive is closed by then.
func (l *deviceLog) close() {
	close(l.failures)
	l.stopped.Wait()
}
