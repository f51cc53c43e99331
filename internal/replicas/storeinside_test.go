package replicas

import (
	"reflect"
	"testing"

	"jbofd/internal/kvstore"
)

// TestTheStoreGetsAllOfARequest: the store's request has each field of the replica's, whatever it had before.
func TestTheStoreGetsAllOfARequest(t *testing.T) {
	g, q := Replicas{}, kvstore.Request{}
	v := reflect.ValueOf(&q).Elem()
	for i := range v.NumField() {
		switch f := v.Field(i); f.Kind() {
		case reflect.Bool:
			f.SetBool(true)
		case reflect.Int64:
			f.SetInt(int64(i + 1))
		case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
			f.SetUint(uint64(i + 1))
		}
	}
	q.Op, q.Value, q.Range = kvstore.CopyIn, []byte("batch"), kvstore.Range{First: 7}
	q.ID = kvstore.Identity{Client: 1, Seq: 2, KeepUntil: 3, Retry: true}
	for range 2 {
		s := &storeRequest{g: &g}
		g.freeStore, g.storeSpares.n = s, 1
		g.store(nil, &q)
		got := reflect.ValueOf(&s.Request).Elem()
		for i := range v.NumField() {
			switch name := v.Type().Field(i).Name; name {
			case "Key", "Tag", "Room", "Restore": // Tag is the store's own, and replicas use neither Room nor Restore
			default:
				if want := v.Field(i).Interface(); !reflect.DeepEqual(got.FieldByName(name).Interface(), want) {
					t.Errorf("%s is %v, want %v", name, got.FieldByName(name), want)
				}
			}
		}
		q = kvstore.Request{Op: kvstore.CopyIn}
	}
}
