package hunt

import "testing"

func TestTheFirstFailureIsFound(t *testing.T) {
	for want, history := range map[string]func(t Reporter){
		"":            func(t Reporter) { t.Logf("nothing") },
		"first":       func(t Reporter) { t.Errorf("%s", "first"); t.Errorf("second") },
		"fatal":       func(t Reporter) { t.Fatalf("fatal"); t.Errorf("behind it") },
		"before":      func(t Reporter) { t.Errorf("before"); panic("a panic") },
		"panic: lone": func(Reporter) { panic("lone") },
		"failed": func(t Reporter) {
			if t.Errorf("failed"); !t.Failed() {
				panic("it has not failed")
			}
		},
	} {
		if got := Run(history); got != want {
			t.Errorf("%q is found, want %q", got, want)
		}
	}
}
