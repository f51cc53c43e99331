package invariants

import (
	"testing"

	"jbofd/internal/buildtags"
)

func TestCheckPanicsOnlyWhenBroken(t *testing.T) {
	Check(true, "holds")
	defer func() {
		if r := recover(); r != "invariant broken: two is not one" {
			t.Fatalf("recovered %v", r)
		}
	}()
	Check(1 == 2, "two is not one")
}

func TestEnabledFollowsTheBuild(t *testing.T) {
	if Enabled != (buildtags.Invariants || buildtags.Race) {
		t.Fatal("Enabled does not follow the build tags")
	}
}
