package drive

import (
	"testing"

	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// One flush is enough for all pieces, and the compare half of a CompareWrite needs none: FUA is that of its write.
func TestFUAOfComposedReadsIsThatOfTheirFirstPiece(t *testing.T) {
	scratch := make([]byte, scratchBytes)
	for op, want := range map[pipeline.Op]ssd.Flags{pipeline.Verify: ssd.FUA, pipeline.Compare: ssd.FUA,
		pipeline.CompareWrite: 0} {
		io := &IO{Op: op, Flags: ssd.FUA, Len: 2 * scratchBytes}
		if got := (verify{}).next(io, scratch).Flags; got != want {
			t.Errorf("%v: the first piece has flags %d, want %d", op, got, want)
		}
		io.done = scratchBytes
		if got := (verify{}).next(io, scratch).Flags; got != 0 {
			t.Errorf("%v: the second piece has flags %d", op, got)
		}
	}
}
