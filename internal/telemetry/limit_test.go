package telemetry

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"
)

// recorder keeps what is logged.
type recorder struct {
	lines []string
}

func (r *recorder) Enabled(context.Context, slog.Level) bool { return true }
func (r *recorder) WithAttrs([]slog.Attr) slog.Handler       { return r }
func (r *recorder) WithGroup(string) slog.Handler            { return r }
func (r *recorder) Handle(_ context.Context, rec slog.Record) error {
	line := rec.Message
	rec.Attrs(func(a slog.Attr) bool { line += " " + a.String(); return true })
	r.lines = append(r.lines, line)
	return nil
}

func TestAHostileFloodIsLoggedAtABoundedRate(t *testing.T) {
	out, dropped := &recorder{}, 0
	h := LimitHandler(out, LimitOptions{Lines: 2, Dropped: func(n int) { dropped += n }})
	at := time.Unix(1000, 0)
	log := func(h slog.Handler, msg string) {
		if err := h.Handle(context.Background(), slog.NewRecord(at, slog.LevelWarn, msg, 0)); err != nil {
			t.Fatal(err)
		}
	}
	for range 100 {
		log(h.WithAttrs([]slog.Attr{slog.String("host", "x")}), "protocol error")
		log(h.WithGroup("g"), "protocol error")
	}
	log(h, "keep alive expired")
	if len(out.lines) != 3 || dropped != 198 {
		t.Fatalf("%d lines, %d dropped: %q", len(out.lines), dropped, out.lines)
	}
	at = at.Add(time.Second)
	log(h, "protocol error")
	log(h, "protocol error")
	if got := out.lines[3:]; len(got) != 2 || got[0] != "protocol error suppressed=198" || got[1] != "protocol error" {
		t.Errorf("%q", got)
	}
}

// TestACauseIsLoggedOnceInAPeriod, however often it comes, and the next line says how often. The limiter remembers a
// bounded number of causes, and forgets those that do not come again.
func TestACauseIsLoggedOnceInAPeriod(t *testing.T) {
	out, dropped := &recorder{}, 0
	h := LimitHandler(out, LimitOptions{Lines: 1000, Dropped: func(n int) { dropped += n }, CauseEvery: time.Minute,
		Cause: func(r *slog.Record) (cause string) {
			r.Attrs(func(a slog.Attr) bool { cause = a.Value.String(); return true })
			return cause
		}}).(*limitHandler)
	at := time.Unix(1000, 0)
	log := func(causes ...string) {
		for _, c := range causes {
			r := slog.NewRecord(at, slog.LevelWarn, "refused", 0)
			if c != "" {
				r.AddAttrs(slog.String("by", c))
			}
			if err := h.Handle(context.Background(), r); err != nil {
				t.Fatal(err)
			}
		}
		at = at.Add(time.Second)
	}
	for range 50 {
		log("a", "b", "")
	}
	if len(out.lines) != 52 || dropped != 98 {
		t.Fatalf("%d lines, %d dropped", len(out.lines), dropped)
	}
	out.lines, at = nil, at.Add(time.Minute)
	log("b", "b")
	if !slices.Equal(out.lines, []string{"refused by=b suppressed=49"}) {
		t.Errorf("%q", out.lines)
	}
	for i := range 10 * maxLimitKeys {
		log(fmt.Sprint(i))
	}
	if len(h.shared.causes) > maxLimitKeys {
		t.Errorf("%d causes are remembered", len(h.shared.causes))
	}
	at = at.Add(time.Minute)
	out.lines = nil
	log("new", "new")
	if len(out.lines) != 1 {
		t.Errorf("a new cause is logged %d times", len(out.lines))
	}
}

func TestManyDifferentMessagesDoNotGrowTheLimiter(t *testing.T) {
	out := &recorder{}
	h := LimitHandler(out, LimitOptions{Lines: 1}).(*limitHandler)
	for i := range 10 * maxLimitKeys {
		if err := h.Handle(context.Background(),
			slog.NewRecord(time.Unix(1, 0), slog.LevelWarn, fmt.Sprint("message ", i), 0)); err != nil {
			t.Fatal(err)
		}
	}
	if len(h.shared.messages) > maxLimitKeys+1 || len(out.lines) > maxLimitKeys+1 {
		t.Errorf("%d keys, %d lines", len(h.shared.messages), len(out.lines))
	}
}
