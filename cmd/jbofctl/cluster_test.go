package main

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/admin"
)

// moving is a daemon whose cluster has one range more with all its copies each time that it is asked, and moves the
// replicas of n1 elsewhere. The change that it was asked for is in the channel.
func moving(t *testing.T, ranges int) (socket string, changes chan admin.ChangeCluster) {
	changes = make(chan admin.ChangeCluster, 1)
	var asked atomic.Int64
	return serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == admin.PathClusterChange {
			var what admin.ChangeCluster
			if err := json.NewDecoder(r.Body).Decode(&what); err != nil {
				t.Error(err)
			}
			changes <- what
			_ = json.NewEncoder(w).Encode(admin.Answer{APIVersion: admin.Version})
			return
		}
		done := min(int(asked.Add(1)), ranges)
		_ = json.NewEncoder(w).Encode(admin.Cluster{APIVersion: admin.Version, Node: "n1", Replicas: 3, Ready: true,
			Ranges: admin.ClusterRanges{Total: ranges, Full: done},
			Nodes:  []admin.ClusterNode{{Name: "n1", Out: true, Replicas: ranges - done}, {Name: "n2"}}})
	})), changes
}

func TestAChangeOfTheClusterCanBeWaitedFor(t *testing.T) {
	defer func(d time.Duration) { lookEvery = d }(lookEvery)
	lookEvery = time.Millisecond
	for _, c := range []struct {
		line string
		want admin.ChangeCluster
	}{
		{"cluster drain n1 --wait", admin.ChangeCluster{Drain: "n1"}},
		{"cluster accept-loss --yes 3 4 --wait", admin.ChangeCluster{AcceptLoss: []int{3, 4}}},
		{"cluster accept-loss --yes --all --wait", admin.ChangeCluster{AllLosses: true}},
		{"cluster leave", admin.ChangeCluster{Drain: "n1"}},
		{"cluster join n2 --wait", admin.ChangeCluster{Join: "n2"}},
		{"cluster replicas 3 --wait", admin.ChangeCluster{Replicas: 3}},
		{"cluster status --wait", admin.ChangeCluster{}},
	} {
		s, changes := moving(t, 10)
		screen := typing(t, "")
		var out bytes.Buffer
		args := append([]string{"--socket", s}, strings.Fields(c.line)...)
		if code := execute(t.Context(), args, terminal{in: strings.NewReader(""), out: &out, err: screen}); code != 0 {
			t.Errorf("%s: exit status %d", c.line, code)
		}
		if got := shown(t, screen, "10 of 10 ranges"); got == "" {
			t.Errorf("%s: the terminal shows %q", c.line, got)
		}
		if !reflect.DeepEqual(c.want, admin.ChangeCluster{}) {
			if got := <-changes; !reflect.DeepEqual(got, c.want) {
				t.Errorf("%s: the daemon is asked for %+v, want %+v", c.line, got, c.want)
			}
		}
	}
}

func TestLostNodesAreNamedToTheDaemon(t *testing.T) {
	s, changes := moving(t, 10)
	if code, _, errs := run(t, "cluster", "lost", "--yes", "n1", "n3", "--socket", s); code != 0 {
		t.Fatalf("exit status %d, %s", code, errs)
	}
	if got := <-changes; !reflect.DeepEqual(got, admin.ChangeCluster{Lost: []string{"n1", "n3"}}) {
		t.Errorf("the daemon is asked for %+v", got)
	}
}

func TestForgottenNodesAreNamedToTheDaemon(t *testing.T) {
	s, changes := moving(t, 10)
	if code, out, errs := run(t, "cluster", "forget", "n1", "n3", "--socket", s); code != 0 ||
		!strings.Contains(out, "the cluster has forgotten n1, n3") {
		t.Fatalf("exit status %d, %s, %s", code, out, errs)
	}
	if got := <-changes; !reflect.DeepEqual(got, admin.ChangeCluster{Forget: []string{"n1", "n3"}}) {
		t.Errorf("the daemon is asked for %+v", got)
	}
	if code, _, errs := run(t, "smart-log", "/dev/nvme0", "--socket", s); code != 2 ||
		!strings.Contains(errs, `unknown command "smart-log"; is it "jbofctl ssd smart-log"?`) {
		t.Errorf("a command without its noun: exit status %d, %s", code, errs)
	}
	if code, _, errs := run(t, "cluster", "forget", "--socket", s); code != 2 {
		t.Errorf("without a name: exit status %d, %s", code, errs)
	}
}

func TestAWaitThatEndsEarlySaysWhatIsMissing(t *testing.T) {
	s, _ := moving(t, 1<<30)
	code, _, errs := run(t, "cluster", "status", "--wait", "--timeout", "2s", "--socket", s)
	if code != 1 || !strings.Contains(errs, "the time is over") || !strings.Contains(errs, "ranges have all their") {
		t.Errorf("the time is over: exit status %d, %s", code, errs)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var errb bytes.Buffer
	if code := execute(ctx, []string{"cluster", "status", "--wait", "--socket", s},
		terminal{in: strings.NewReader(""), out: io.Discard, err: &errb}); code != 130 {
		t.Errorf("interrupted: exit status %d, %s", code, &errb)
	}
	for _, c := range []struct {
		a    admin.Cluster
		what admin.ChangeCluster
		want string
	}{
		{admin.Cluster{}, admin.ChangeCluster{}, "the view does not say so yet"},
		{admin.Cluster{Replicas: 2, Ranges: admin.ClusterRanges{Total: 4, Full: 4}}, admin.ChangeCluster{Replicas: 3},
			"the view does not say so yet"},
		{admin.Cluster{Ranges: admin.ClusterRanges{Total: 4, Full: 3}}, admin.ChangeCluster{},
			"3 of 4 ranges have all their copies"},
		{admin.Cluster{Ranges: admin.ClusterRanges{Total: 4, Full: 4}, Nodes: []admin.ClusterNode{{Name: "a"}}},
			admin.ChangeCluster{Drain: "a"}, "node a has 0 replicas"},
		{admin.Cluster{Ranges: admin.ClusterRanges{Total: 4, Full: 4},
			Nodes: []admin.ClusterNode{{Name: "a", Out: true}}}, admin.ChangeCluster{Join: "a"},
			"node a is to have no ranges"},
		{admin.Cluster{Ranges: admin.ClusterRanges{Total: 4, Full: 4},
			Nodes: []admin.ClusterNode{{Name: "a", Out: true, Replicas: 2}}}, admin.ChangeCluster{Drain: "a"},
			"node a has 2 replicas"},
		{admin.Cluster{Ranges: admin.ClusterRanges{Total: 4, Full: 4},
			Nodes: []admin.ClusterNode{{Name: "a", Out: true}}}, admin.ChangeCluster{Drain: "a"},
			"the nodes are not connected to each other yet"},
		{admin.Cluster{Ready: true, Ranges: admin.ClusterRanges{Total: 4, Full: 4},
			Nodes: []admin.ClusterNode{{Name: "a", Out: true}}}, admin.ChangeCluster{Drain: "a"}, ""},
	} {
		if _, _, got := settled(&c.a, c.what); got != c.want {
			t.Errorf("%+v of %+v: %q, want %q", c.what, c.a, got, c.want)
		}
	}
}

// TestAWaitSaysWhyItWaits: where it cannot show that on a terminal, in a line, and at its end with what was missing at
// last, also when the daemon does not answer any more.
func TestAWaitSaysWhyItWaits(t *testing.T) {
	defer func(look, say time.Duration) { lookEvery, sayEvery = look, say }(lookEvery, sayEvery)
	lookEvery, sayEvery = time.Millisecond, 0
	ctx, cancel := context.WithCancel(t.Context())
	var asked atomic.Int64
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1) > 3 {
			cancel()
			<-r.Context().Done()
			return
		}
		_ = json.NewEncoder(w).Encode(admin.Cluster{APIVersion: admin.Version, Problem: "no cluster of this name"})
	}))
	var errb bytes.Buffer
	code := execute(ctx, []string{"cluster", "status", "--wait", "--socket", s},
		terminal{in: strings.NewReader(""), out: io.Discard, err: &errb})
	const left = "this node does not take part: no cluster of this name"
	if got := errb.String(); code != 130 || strings.Count(got, "not yet: "+left) != 1 ||
		!strings.HasSuffix(got, "interrupted, and it is not done yet: "+left+"\n") {
		t.Errorf("exit status %d, %s", code, got)
	}
}

// TestAWaitForAClusterThatNobodyHasMadeEnds, unless a time is given: only a command makes it, perhaps on another node.
// A node that has not looked since that command is waited for.
func TestAWaitForAClusterThatNobodyHasMadeEnds(t *testing.T) {
	defer func(look, patience time.Duration) { lookEvery, noClusterPatience = look, patience }(lookEvery,
		noClusterPatience)
	lookEvery, noClusterPatience = time.Millisecond, 100*time.Millisecond
	for _, c := range []struct {
		line  string
		looks int64 // that find no cluster
		code  int
		want  string
	}{
		{"cluster status --wait", 1 << 30, 1, "there is nothing to wait for: no cluster of this name; run init"},
		{"cluster status --wait", 5, 0, ""},
		{"cluster status --wait --timeout 1s", 1 << 30, 1, "the time is over"},
	} {
		var asked atomic.Int64
		s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			a := admin.Cluster{APIVersion: admin.Version, Ready: true, Ranges: admin.ClusterRanges{Total: 4, Full: 4}}
			if asked.Add(1) <= c.looks {
				a = admin.Cluster{APIVersion: admin.Version, NoCluster: true,
					Problem: "no cluster of this name; run init"}
			}
			_ = json.NewEncoder(w).Encode(a)
		}))
		if code, _, errs := run(t, append(strings.Fields(c.line), "--socket", s)...); code != c.code ||
			!strings.Contains(errs, c.want) {
			t.Errorf("%s, %d looks: exit status %d, %s", c.line, c.looks, code, errs)
		}
	}
}

// TestNobodyIsAskedToConfirmWhatIsRefused, and what is confirmed is done once.
func TestNobodyIsAskedToConfirmWhatIsRefused(t *testing.T) {
	for _, line := range []string{"cluster lost n3", "cluster accept-loss 3"} {
		for _, refused := range []bool{true, false} {
			var dry, done atomic.Int64
			s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == admin.PathCluster {
					_ = json.NewEncoder(w).Encode(admin.Cluster{APIVersion: admin.Version, Name: "demo",
						Ranges: admin.ClusterRanges{Total: 4, Halted: 1}})
					return
				}
				var what admin.ChangeCluster
				if err := json.NewDecoder(r.Body).Decode(&what); err != nil {
					t.Error(err)
				}
				if what.DryRun {
					dry.Add(1)
				} else {
					done.Add(1)
				}
				a := admin.Answer{APIVersion: admin.Version}
				if refused {
					w.WriteHeader(http.StatusConflict)
					a.Error = "it runs"
				}
				_ = json.NewEncoder(w).Encode(a)
			}))
			var out, errs bytes.Buffer
			code := execute(t.Context(), append(strings.Fields(line), "--socket", s),
				terminal{in: typing(t, "demo"), out: &out, err: &errs})
			asked := strings.Contains(errs.String(), "of cluster demo")
			if refused && (code != 1 || asked || done.Load() != 0 || !strings.Contains(errs.String(), "it runs")) ||
				!refused && (code != 0 || !asked || done.Load() != 1 || dry.Load() != 1) {
				t.Errorf("%s, refused %v: exit status %d, asked %v, done %d times: %s", line, refused, code, asked,
					done.Load(), &errs)
			}
		}
	}
}

// TestManyNumbersAreCut for a table.
func TestManyNumbersAreCut(t *testing.T) {
	if got := firstOf([]int{3, 7}); got != "3 7" {
		t.Errorf("%q", got)
	}
	if got := firstOf(make([]int, 33)); strings.Count(got, "0") != 32 || !strings.HasSuffix(got, " …") {
		t.Errorf("%q", got)
	}
}

// TestADaemonThatDoesNotAnswerIsSaidSo, with the time that was given to it.
func TestADaemonThatDoesNotAnswerIsSaidSo(t *testing.T) {
	s := serve(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	code, _, errs := run(t, "cluster", "status", "--timeout", "100ms", "--socket", s)
	if code != 1 || !strings.Contains(errs, "jbofd has not answered within 100ms") || strings.Contains(errs, "Get ") {
		t.Errorf("exit status %d, %s", code, errs)
	}
}

// TestStatusSaysThatItIsOld, and of a node that is away that nobody fills it.
func TestStatusSaysThatItIsOld(t *testing.T) {
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(admin.Cluster{APIVersion: admin.Version, StaleMS: 12_000,
			Ranges: admin.ClusterRanges{Total: 256, Full: 256},
			Nodes: []admin.ClusterNode{{Name: "n2", State: "away", Partitions: 1, Waiting: 256},
				{Name: "n3", State: "up"}}})
	}))
	code, out, errs := run(t, "cluster", "status", "--socket", s)
	out = strings.Join(strings.Fields(out), " ")
	if code != 0 || !strings.Contains(out, "as of 12s ago") || !strings.Contains(out, "n2 away 1 0 0 0 256") ||
		!strings.Contains(out, "n3 was up") {
		t.Errorf("exit status %d, %s%s", code, out, errs)
	}
	_, out, _ = run(t, "cluster", "replicas", "1", "--socket", fake(t))
	if !strings.Contains(out, "1 copy of each key") ||
		!strings.Contains(out, "this may take effect later: etcd does not answer") {
		t.Errorf("a change that nobody makes: %s", out)
	}
	if _, out, _ := run(t, "cluster", "chains", "--help"); strings.Contains(out, "-1") {
		t.Errorf("a default that may not be given: %s", out)
	}
}

// TestAWaitOutlastsTheRestartOfTheDaemon: until the node takes part again, what it knows is from before.
func TestAWaitOutlastsTheRestartOfTheDaemon(t *testing.T) {
	defer func(d time.Duration) { lookEvery = d }(lookEvery)
	lookEvery = time.Millisecond
	var asked atomic.Int64
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		a := admin.Cluster{APIVersion: admin.Version, Replicas: 1, Ready: true,
			Ranges: admin.ClusterRanges{Total: 4, Full: 4}}
		switch n := asked.Add(1); {
		case n <= 3:
			w.WriteHeader(http.StatusServiceUnavailable)
			_ = json.NewEncoder(w).Encode(admin.Answer{APIVersion: admin.Version, Error: "the daemon is starting"})
			return
		case n <= 6:
			a.Problem = "the node waits for a view that admits it"
		}
		_ = json.NewEncoder(w).Encode(a)
	}))
	if code, _, errs := run(t, "cluster", "status", "--socket", s); code != 1 ||
		!strings.Contains(errs, "jbofd refused: the daemon is starting") {
		t.Errorf("without --wait: exit status %d, %s", code, errs)
	}
	if code, out, errs := run(t, "cluster", "status", "--wait", "--socket", s); code != 0 || asked.Load() < 8 ||
		strings.Contains(out, "problem") {
		t.Errorf("exit status %d after %d requests: %s%s", code, asked.Load(), out, errs)
	}
	// What is refused for good is said at once.
	s = serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusConflict)
		_ = json.NewEncoder(w).Encode(admin.Answer{APIVersion: admin.Version, Error: "there is no cluster"})
	}))
	if code, _, errs := run(t, "cluster", "status", "--wait", "--socket", s); code != 1 ||
		!strings.Contains(errs, "there is no cluster") {
		t.Errorf("exit status %d, %s", code, errs)
	}
}

func TestLeaveWarnsOfAServerOfEtcd(t *testing.T) {
	for _, runs := range []bool{false, true} {
		s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_ = json.NewEncoder(w).Encode(admin.Cluster{APIVersion: admin.Version, Node: "n1", RunsEtcd: runs,
				Ready: true, Ranges: admin.ClusterRanges{Total: 4, Full: 4},
				Nodes: []admin.ClusterNode{{Name: "n1", Out: true}}})
		}))
		if code, out, errs := run(t, "cluster", "leave", "--socket", s); code != 0 ||
			!strings.Contains(out, "n1 has no ranges") || strings.Contains(out, "server of etcd") != runs {
			t.Errorf("runs etcd %v: exit status %d, %s%s", runs, code, out, errs)
		}
	}
}

func TestANumberThatCannotBeIsRefusedWithoutADaemon(t *testing.T) {
	for line, want := range map[string]string{
		"cluster init --ranges -4":   "--ranges is -4, must be a power of two from 16 to 65536",
		"cluster init --ranges 4":    "--ranges is 4, must be a power of two from 16 to 65536",
		"cluster init --ranges 100":  "--ranges is 100, must be a power of two from 16 to 65536",
		"cluster init --replicas -1": "--replicas is -1, must be 1 to 5",
		"cluster init --replicas 6":  "--replicas is 6, must be 1 to 5",
	} {
		if code, _, errs := run(t, strings.Fields(line)...); code != 2 || !strings.Contains(errs, want) {
			t.Errorf("%s: exit status %d, %s", line, code, errs)
		}
	}
}

// TestTheRingIsDrawn: one shape for each member of each range, with the color of its node, as a valid document.
func TestTheRingIsDrawn(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ring.svg")
	if code, _, errs := run(t, "cluster", "ring", "--svg", file, "--socket", fake(t)); code != 0 {
		t.Fatalf("exit status %d, %s", code, errs)
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	a := admin.Cluster{Name: "a<b", Nodes: []admin.ClusterNode{{Name: "n1"}, {Name: "n2"}}}
	var chains []admin.Chain
	for r := range 4 * ringSectors {
		chains = append(chains, admin.Chain{Range: r, Members: []admin.ChainMember{{Node: "n1", State: "serving"},
			{Node: "n2", State: "filling"}}})
	}
	for name, c := range map[string]struct {
		svg    []byte
		shapes int
	}{
		"two ranges":   {got, 4},
		"many ranges":  {drawRing(&a, chains), 2 * ringSectors},
		"no ranges":    {drawRing(&a, nil), 0},
		"three ranges": {drawRing(&a, chains[:4]), 8},
	} {
		paths, colors := 0, map[string]bool{}
		for d := xml.NewDecoder(bytes.NewReader(c.svg)); ; {
			token, err := d.Token()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if e, ok := token.(xml.StartElement); ok && e.Name.Local == "path" {
				paths++
				for _, at := range e.Attr {
					if at.Name.Local == "fill" {
						colors[at.Value] = true
					}
				}
			}
		}
		if paths != c.shapes || len(colors) != min(c.shapes, 2) {
			t.Errorf("%s: %d shapes, %d colors, want %d and %d", name, paths, len(colors), c.shapes, min(c.shapes, 2))
		}
	}
}
