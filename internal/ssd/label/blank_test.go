package label_test

import (
	"errors"
	"testing"

	"jbofd/internal/ssd/label"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/ssd/ssdtest"
)

func TestADriveWithDataInItsMiddleIsNotBlank(t *testing.T) {
	dev, err := mem.Open(mem.Config{Name: "m", SizeBytes: 48 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	q, err := dev.OpenQueue(1)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 512)
	b[511] = 1
	ssdtest.Write(t, q, 20<<20, b, 0)
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := label.Format(dev, label.NewUUID(), false); !errors.Is(err, label.ErrForeign) {
		t.Fatalf("format says %v, want ErrForeign", err)
	}
}
